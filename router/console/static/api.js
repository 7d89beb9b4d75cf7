// The router's JSON. An admin token, where one was typed, stays in this module's memory and goes out as a bearer token,
// until an order that carried it was refused.

let token = "";

export const useToken = (given) => {
  token = given;
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function answer(response, carried) {
  if (response.ok) return response.json();
  if (carried === token && (response.status === 401 || response.status === 403)) token = "";
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not ours: a proxy's page
  }
  throw new Refused(response.status, message);
}

export async function fleet(since, signal) {
  const query = since === null ? "" : `?since=${since}`;
  return answer(await fetch(`/console/api/fleet${query}`, { signal, cache: "no-store" }));
}

async function send(path, body) {
  const carried = token;
  const headers = { "Content-Type": "application/json", "X-Radixfleet-Console": "1" };
  if (carried) headers.Authorization = `Bearer ${carried}`;
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }), carried);
}

export const explain = (order) => send("/console/api/explain", order);

export const drain = (worker) => send(`/console/api/workers/${encodeURIComponent(worker)}/drain`, {});

export const resume = (worker) => send(`/console/api/workers/${encodeURIComponent(worker)}/resume`, {});
