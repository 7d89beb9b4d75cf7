#include "amx.h"

int rf_amx_usable;

#ifdef RF_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

void rf_amx_ask(void) { rf_amx_usable = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
#else
void rf_amx_ask(void) {}
#endif
