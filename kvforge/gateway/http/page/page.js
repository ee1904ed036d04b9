// The page's beginning: who serves, whether a key is wanted, and the two parts.

import { get, setKey } from "./api.js";
import { byId } from "./dom.js";
import { startLive } from "./live.js";
import { startTalk } from "./talk.js";

const READY_MS = 5000;

async function showState() {
  const state = byId("state");
  try {
    const answer = await (await fetch("ready", { cache: "no-store" })).json();
    state.dataset.state = answer.ready ? "ready" : "down";
    state.textContent = answer.ready ? "ready" : answer.reason;
  } catch {
    state.dataset.state = "down";
    state.textContent = "the gateway does not answer";
  }
}

async function begin() {
  const response = await get("page/model");
  byId("key-form").hidden = response.status !== 401;
  if (!response.ok) {
    return false;
  }
  const facts = await response.json();
  byId("model").textContent = facts.model;
  document.title = `${facts.model} · kvforge`;
  startTalk(facts);
  startLive(facts);
  return true;
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  if (await begin()) {
    byId("key").value = "";
    byId("text").focus();
  } else {
    byId("key-note").textContent = "The server does not take this key.";
  }
});

setInterval(() => document.hidden || showState(), READY_MS);
showState();
begin().catch(showState);
