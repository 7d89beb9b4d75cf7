// Numbers as an operator reads them: few digits, with a unit. "–" where nothing is known.

const UNKNOWN = "–";
const UNITS = [["k", 1e3], ["M", 1e6], ["G", 1e9], ["T", 1e12]];

export function quantity(value) {
  if (value < 9999.5) return Math.round(value).toLocaleString("en-US");
  for (const [unit, size] of UNITS) {
    const scaled = value / size;
    if (scaled < 999.5) return `${scaled.toFixed(scaled < 99.95 ? 1 : 0)}${unit}`;
  }
  return value.toExponential(0);
}

export const rate = (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : quantity(value));

export const percent = (share, decimals = 0) =>
  share === null || share === undefined ? UNKNOWN : `${(100 * share).toFixed(decimals)} %`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
}

export function age(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (!minutes) return `${Math.floor(seconds)} s`;
  if (!hours) return `${minutes} min`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}
