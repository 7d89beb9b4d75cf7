"""lm-eval: evaluations that read the probabilities of a prompt's own tokens."""

from __future__ import annotations

from tests.interop.case import HERE, Case, Context, run
from tests.interop.cases.openai_clients import until_idle


def _lm_eval(context: Context) -> str:
    python = context.python("lm-eval", ["lm-eval[api]==0.4.13", "transformers"])
    environment = {"BASE_URL": context.fleet.url, "MODEL": str(context.fleet.model_dir), "HF_HUB_OFFLINE": "1"}
    run([str(python), str(HERE / "python" / "lm_eval_client.py")], cwd=context.output, environment=environment)
    until_idle(context.fleet)
    return ""


CASES = (
    Case("lm-eval", "lm-eval 0.4.13", "local-completions (log likelihoods, rolling, generation), chats", _lm_eval),
)
