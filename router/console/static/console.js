// The console: asks the router once a second and shows what it says. Nothing is asked while the page is hidden.
// Polling, and not an event stream: a stream could not carry a bearer token, and a proxy may hold it back.

import * as api from "./api.js";
import { Chart } from "./chart.js";
import { attribute, bar, byId, element, keyed, put } from "./dom.js";
import * as explain from "./explain.js";
import { age, duration, percent, quantity, rate } from "./format.js";
import * as orders from "./orders.js";
import * as workers from "./workers.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 5000;
const SPAN_S = 600;
const SMOOTH = 5; // of the router's two-second steps go into one point of a line

const charts = {
  speed: new Chart(byId("speed-chart"), byId("speed-now"), { series: [{ name: "out", told: "tokens/s", area: true }], format: rate, label: "Output" }),
  hit: new Chart(byId("hit-chart"), byId("hit-now"), { series: [{ name: "hit", told: "cached", area: true }, { name: "reach", told: "reachable" }], format: percent, top: 1, label: "Hit rate" }),
};
let steps = [];
let uptime = 0;
let heardAt = null;
let wake = () => {};

async function poll() {
  const since = steps.length ? steps.at(-1).at_s : null;
  try {
    const feed = await api.fleet(since, AbortSignal.timeout(TIMEOUT_MS));
    // Another router, or this one restarted: what was before does not fit on its clock's axis.
    const isAnother = feed.fleet.uptime_s < uptime;
    uptime = feed.fleet.uptime_s;
    if (isAnother && steps.length) {
      steps = [];
      return true;
    }
    steps = [...steps, ...feed.points].filter((step) => feed.now_s - step.at_s <= SPAN_S + 20);
    heardAt = performance.now();
    show(feed);
    trouble("");
  } catch (problem) {
    trouble(problem instanceof api.Refused ? problem.message : "The router does not answer. Trying again.");
  }
  return false;
}

function trouble(text) {
  const banner = byId("banner");
  put(banner, text);
  banner.hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
  // The banner is read aloud, and must not change every second; this is not.
  const silent = heardAt === null ? "" : ` for ${age((performance.now() - heardAt) / 1000)}`;
  put(byId("live-text"), text ? `no answer${silent}` : "live");
  attribute(byId("live"), "class", text ? "live lost" : "live");
}

function show(feed) {
  const { fleet } = feed;
  const states = Object.entries(fleet.states).filter(([, count]) => count > 0);
  keyed(byId("states"), states, ([state]) => state, ([state]) => element("li", { class: `badge ${state}` }), (node, [state, count]) => put(node, `${count} ${state}`));
  put(byId("about"), `${fleet.policy} · up ${age(fleet.uptime_s)} · ${fleet.version}`);
  tiles(fleet);
  lines(feed.now_s);
  split(fleet);
  workers.show(feed.workers, feed.trends);
  hottest(feed.hottest);
  explain.models(fleet.models);
}

function tiles(fleet) {
  const { pace, kv, split } = fleet;
  const kvTotal = kv.total || 1;
  put(byId("out"), rate(pace.output_tokens_per_s));
  put(byId("in"), rate(pace.prompt_tokens_per_s));
  put(byId("hit"), percent(pace.hit_rate));
  put(byId("reach"), percent(split ? split.hit + split.index + split.routing : null));
  put(byId("ttft"), duration(pace.ttft_p50_s));
  put(byId("ttft99"), duration(pace.ttft_p99_s));
  put(byId("flight"), quantity(fleet.in_flight));
  put(byId("queued"), quantity(fleet.queued));
  put(byId("persec"), rate(pace.requests_per_s));
  put(byId("kv"), percent(kv.used / kvTotal));
  put(byId("kvcached"), percent(kv.evictable / kvTotal));
  put(byId("bubble"), percent(pace.bubble_share, 1));
}

function lines(now) {
  const sums = steps.map((_, index) => {
    const some = steps.slice(Math.max(0, index - SMOOTH + 1), index + 1);
    const sum = (name) => some.reduce((total, step) => total + step[name], 0);
    return {
      at: steps[index].at_s,
      speed: sum("output_tokens") / Math.max(1e-3, sum("seconds")),
      hit: sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : null,
      reach: sum("asked") ? sum("reachable") / sum("asked") : null,
    };
  });
  charts.speed.show(sums.map(({ at, speed }) => ({ at, values: [speed] })), now);
  charts.hit.show(sums.map(({ at, hit, reach }) => ({ at, values: [hit, reach] })), now);
}

function split(fleet) {
  const shares = fleet.split ?? { hit: 0, index: 0, routing: 0, workload: 0, prediction_error: null };
  const parts = [
    ["found", "cached", shares.hit],
    ["lost-index", "predicted, but not there", shares.index],
    ["lost-routing", "on a busier worker", shares.routing],
    ["lost-workload", "nowhere: new to the fleet", shares.workload],
  ];
  const told = parts.map(([, name, share]) => `${percent(Math.max(0, share))} ${name}`).join(", ");
  bar(byId("split-bar"), parts.map(([kind, , share]) => [kind, share]), fleet.split ? told : "no prompts in the last minute");
  const items = parts.map(([kind, name, share]) => ({ kind, text: `${fleet.split ? percent(Math.max(0, share)) : "–"} ${name}` }));
  const { asked, reachable, predicted, actual } = fleet.prompt_tokens;
  const counts = `${quantity(asked)} asked, ${quantity(reachable)} reachable, ${quantity(predicted)} predicted, ${quantity(actual)} cached; predictions missed by ${percent(shares.prediction_error, 1)}`;
  items.push({ kind: "counts", text: counts });
  keyed(byId("split-legend"), items, ({ kind }) => kind, ({ kind }) => element("li", { class: kind === "counts" ? "counts" : `key ${kind}` }), (node, { text }) => put(node, text));
}

function hottest(prefixes) {
  byId("no-hot").hidden = prefixes.length > 0;
  byId("hot-table").hidden = prefixes.length === 0;
  const most = prefixes.length ? prefixes[0].saved_tokens : 1;
  keyed(byId("hot-rows"), prefixes, ({ prefix }) => prefix, hotRow, (node, hot) => {
    put(node.querySelector("code"), hot.prefix.slice(0, 8));
    put(node.querySelector(".text"), hot.text);
    bar(node.querySelector(".bar"), [["found", hot.saved_tokens / most]], `${quantity(hot.saved_tokens)} tokens saved`);
    put(node.querySelector(".length"), quantity(hot.tokens));
    put(node.querySelector(".requests"), quantity(hot.requests));
    put(node.querySelector(".saved"), quantity(hot.saved_tokens));
    put(node.querySelector(".held"), hot.workers.length > 4 ? `${hot.workers.length} workers` : hot.workers.join(", ") || "nobody now");
  });
}

function hotRow() {
  const name = element("th", { scope: "row" }, element("code"), element("span", { class: "text" }), element("div", { class: "bar", role: "img" }));
  const number = (kind, label) => element("td", { class: `number ${kind}`, "data-label": label });
  return element("tr", {}, name, number("length", "Length"), number("requests", "Requests"), number("saved", "Saved"), element("td", { class: "held", "data-label": "Held by" }));
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })).then(visible);
}

async function run() {
  for (;;) {
    await visible();
    const again = await poll();
    if (!again) {
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, PERIOD_MS);
      });
    }
  }
}

orders.listen(() => wake());
explain.listen();
run();
