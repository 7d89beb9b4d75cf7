// The table of workers. On a phone each row is a card, whose cells say what they are by themselves.

import { spark } from "./chart.js";
import { attribute, bar, byId, element, keyed, put } from "./dom.js";
import { bytes, duration, percent, quantity, rate } from "./format.js";
import { ask } from "./orders.js";

const CELLS = [
  ["state", "State"],
  ["load", "Run / wait"],
  ["memory", "Memory"],
  ["kv", "KV pool"],
  ["hit", "Hit rate"],
  ["speed", "Tokens/s"],
  ["ttft", "TTFT p50"],
  ["bubble", "Bubble"],
];
const NUMBERS = new Set(["load", "hit", "speed", "ttft", "bubble"]);

export function show(workers, trends) {
  keyed(byId("worker-rows"), workers, (row) => row.address, make, (node, row) => fill(node, row, trends[workers.indexOf(row)]));
  byId("no-workers").hidden = workers.length > 0;
  byId("worker-table").hidden = workers.length === 0;
  const advice = workers.flatMap((row) => row.advice.map((text) => ({ worker: row.worker, text })));
  keyed(byId("advice"), advice, (item) => `${item.worker} ${item.text}`, () => element("li"), (node, item) => put(node, `${item.worker}: ${item.text}`));
}

function make() {
  const name = element("th", { scope: "row", class: "name" }, element("b"), element("small"));
  const cells = CELLS.map(([kind, label]) => element("td", { class: NUMBERS.has(kind) ? `${kind} number` : kind, "data-label": label }));
  const row = element("tr", {}, name, ...cells, element("td", { class: "order" }));
  const part = (kind) => row.querySelector(`.${kind}`);
  part("state").append(element("span", { class: "badge" }), element("small"));
  for (const kind of ["memory", "kv"]) part(kind).append(element("div", { class: "bar", role: "img" }), element("small"));
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("class", "spark");
  line.setAttribute("aria-hidden", "true");
  part("speed").append(line, element("span"));
  return row;
}

function fill(row, worker, trend) {
  const part = (selector) => row.querySelector(selector);
  const { pace, kv, memory } = worker;
  const heard = worker.state !== "disconnected";
  put(part(".name b"), worker.worker);
  put(part(".name small"), worker.model ? `${worker.model} · ${worker.address}` : worker.address);
  put(part(".badge"), worker.state);
  attribute(part(".badge"), "class", `badge ${worker.state}`);
  put(part(".state small"), worker.note);
  put(part(".load"), heard ? `${worker.running} / ${worker.waiting}` : "–");
  memoryBar(part(".memory"), memory);
  kvBar(part(".kv"), kv);
  put(part(".hit"), percent(pace.hit_rate));
  put(part(".speed span"), heard ? rate(pace.output_tokens_per_s) : "–");
  spark(part(".spark"), trend);
  put(part(".ttft"), duration(pace.ttft_p50_s));
  put(part(".bubble"), percent(pace.bubble_share, 1));
  order(part(".order"), worker);
}

function memoryBar(cell, memory) {
  const total = memory.total_bytes;
  const pools = [["weights", memory.weights_bytes], ["kvpool", memory.kv_bytes], ["activations", memory.activations_bytes]];
  const label = total
    ? `weights ${bytes(pools[0][1])}, KV cache ${bytes(pools[1][1])}, activations ${bytes(pools[2][1])} of ${bytes(total)} on ${memory.device}; KV bounded by ${memory.bounded_by}`
    : "not known yet";
  bar(cell.firstChild, pools.map(([name, size]) => [name, total ? size / total : 0]), label);
  put(cell.lastChild, total ? `${bytes(memory.kv_bytes)} of ${bytes(total)}` : "");
}

function kvBar(cell, kv) {
  const share = (tokens) => (kv.total ? tokens / kv.total : 0);
  const label = `${quantity(kv.used)} tokens used, ${quantity(kv.evictable)} cached, ${quantity(kv.free)} free of ${quantity(kv.total)}`;
  bar(cell.firstChild, [["used", share(kv.used)], ["evictable", share(kv.evictable)]], label);
  put(cell.lastChild, kv.total ? `${percent(share(kv.used))} used, ${percent(share(kv.evictable))} cached` : "");
}

function order(cell, worker) {
  const kind = { serving: "drain", draining: "resume" }[worker.state];
  const wanted = kind ? `${kind} ${worker.worker}` : ""; // another worker may come to the same address
  if (cell.dataset.order === wanted) return;
  const hadFocus = cell.contains(document.activeElement);
  cell.dataset.order = wanted;
  cell.replaceChildren();
  if (!kind) return;
  const name = kind === "drain" ? "Drain" : "Resume";
  const button = element("button", { type: "button", "aria-label": `${name} ${worker.worker}` }, name);
  button.addEventListener("click", () => ask(kind, worker.worker));
  cell.append(button);
  if (hadFocus) button.focus();
}
