// The form that asks where a prompt would go, and its answer.

import * as api from "./api.js";
import { bar, byId, element } from "./dom.js";
import { quantity } from "./format.js";

const REASONS = {
  only: "no other worker was eligible",
  prefix: "no eligible worker holds more of it",
  spill: "another worker holds more of it, but is so busy that this one is cheaper",
  load: "nobody holds any of it: the least loaded",
  turn: "it is its turn",
  chance: "drawn at random",
  hash: "the home of its prefix",
};

let asked = 0; // questions: only the last one's answer is shown

export function listen() {
  byId("explain").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = byId("prompt").value;
    const order = { model: byId("model").value, cache_salt: byId("salt").value };
    if (byId("as-chat").checked) order.messages = [{ role: "user", content: text }];
    else order.text = text;
    const mine = ++asked;
    let told;
    try {
      told = answer(await api.explain(order));
    } catch (problem) {
      told = [element("p", { class: "problem" }, problem.message)];
    }
    if (mine === asked) byId("explained").replaceChildren(...told);
  });
}

export function models(names) {
  const select = byId("model");
  byId("model-label").hidden = names.length < 2;
  if (select.dataset.names === names.join("\n")) return;
  select.dataset.names = names.join("\n");
  const chosen = select.value;
  const options = names.length < 2 ? [element("option", { value: "" })] : names.map((name) => element("option", { value: name }, name));
  select.replaceChildren(...options);
  if (names.includes(chosen)) select.value = chosen;
}

function answer(explanation) {
  const size = `${quantity(explanation.prompt_tokens)} tokens, ${explanation.prompt_blocks} whole blocks, policy ${explanation.policy}.`;
  const verdict = explanation.worker_id
    ? [element("b", {}, explanation.worker_id), ` would get it: ${REASONS[explanation.reason] ?? explanation.reason}. `]
    : ["No worker can take it now. "];
  const heads = ["Worker", "Cached", "To compute", "Queued there", "Running", "Cost"];
  const head = element("tr", {}, ...heads.map((name, index) => element("th", { scope: "col", class: index ? "number" : "" }, name)));
  const rows = explanation.candidates.map((candidate) => row(candidate, explanation));
  const table = element("table", { class: "candidates" }, element("caption", { class: "hidden" }, "What each worker would cost"), element("thead", {}, head), element("tbody", {}, ...rows));
  return [element("p", { class: "verdict" }, ...verdict, element("span", { class: "hint" }, size)), table];
}

function row(candidate, explanation) {
  const share = element("div", { class: "bar", role: "img" });
  bar(share, [["found", candidate.matched_tokens / Math.max(1, explanation.prompt_tokens)]], `${candidate.matched_tokens} of ${explanation.prompt_tokens} tokens cached`);
  const why = candidate.eligible ? (candidate.approximate ? "approximate" : "") : candidate.ineligible_reason;
  const cells = [
    ["Cached", quantity(candidate.matched_tokens)],
    ["To compute", quantity(candidate.uncached_tokens)],
    ["Queued there", quantity(candidate.outstanding_prompt_tokens)],
    ["Running", String(candidate.running_requests)],
    ["Cost", candidate.eligible ? quantity(candidate.cost) : "–"],
  ].map(([label, text]) => element("td", { class: "number", "data-label": label }, text));
  const chosen = candidate.worker_id === explanation.worker_id && explanation.worker_id;
  const name = element("th", { scope: "row" }, element("b", {}, candidate.worker_id || candidate.address), element("small", {}, chosen ? "chosen" : why), share);
  return element("tr", chosen ? { class: "chosen" } : {}, name, ...cells);
}
