// Orders to workers: asked for again before they are sent, with the admin token where the router wants one.

import * as api from "./api.js";
import { byId } from "./dom.js";

const ORDERS = {
  drain: {
    title: (worker) => `Drain ${worker}?`,
    text: "It gets no new requests. Running ones may finish, until the worker's grace is over; then they are cut.",
    yes: "Drain",
    send: api.drain,
  },
  resume: {
    title: (worker) => `Put ${worker} back to work?`,
    text: "It gets requests again.",
    yes: "Resume",
    send: api.resume,
  },
};

let asked = null;

export function ask(kind, worker) {
  const order = ORDERS[kind];
  asked = { order, worker };
  byId("confirm-title").textContent = order.title(worker);
  byId("confirm-text").textContent = order.text;
  byId("confirm-yes").textContent = order.yes;
  byId("confirm-problem").textContent = "";
  byId("confirm-yes").disabled = false;
  byId("confirm").showModal();
  byId("confirm-no").focus();
}

export function listen(onDone) {
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
  byId("confirm-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (byId("token").value) api.useToken(byId("token").value);
    byId("confirm-yes").disabled = true;
    const sent = asked;
    try {
      await sent.order.send(sent.worker);
      onDone();
      if (asked !== sent) return; // left by Escape, and another one is asked for
      byId("token").value = "";
      byId("confirm").close();
    } catch (problem) {
      if (asked !== sent) return;
      const needsToken = problem.status === 401 || problem.status === 403;
      byId("token-field").hidden = !needsToken;
      byId("confirm-problem").textContent = problem.message;
      if (needsToken) byId("token").focus();
    } finally {
      if (asked === sent) byId("confirm-yes").disabled = false;
    }
  });
}
