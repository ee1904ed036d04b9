// Asking: chat and completion, streamed into the conversation that is shown.

import { answer } from "./answer.js";
import { messagesOf, openCalls } from "./conversation.js";
import { byId } from "./dom.js";
import { editForm, resultForm, sendByEnter, view } from "./entries.js";
import { givenSettings, requestFields, startSettings } from "./settings.js";
import { keep, shown, startShelf } from "./shelf.js";

const ASKING = ["user", "tool", "completion"];
let model = "";
let running = null;

export function startTalk(facts) {
  model = facts.model;
  if (!facts.chat) {
    byId("mode-chat").disabled = true;
    byId("mode-complete").checked = true;
    note("This model has no chat template, so it completes texts.");
  }
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("ask").addEventListener("change", showMode);
  sendByEnter(byId("text"));
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  byId("stop").addEventListener("click", stop);
  addEventListener("pagehide", () => running && keep(shown()));
  startSettings(facts);
  showMode();
  startShelf(facts, () => {
    stop();
    note("");
    draw();
  });
}

const completes = () => byId("mode-complete").checked;

function showMode() {
  byId("chat-only").disabled = completes();
}

function note(text) {
  byId("talk-note").textContent = text;
}

function stop() {
  running?.abort();
  running = null;
  busy(false);
}

function ask() {
  const text = byId("text").value;
  if (text.trim()) {
    const role = completes() ? "completion" : "user";
    const entry = role === "user" ? { role, content: text } : { role, prompt: text, content: "" };
    go(shown().entries.length, [entry], () => (byId("text").value = ""));
  }
}

// From the entry `index` on let the conversation be `more`, and ask for an answer to it.
async function go(index, more, begun = () => {}) {
  const conversation = shown();
  const last = more[more.length - 1];
  const chats = last.role !== "completion";
  let body;
  if (running) {
    return;
  }
  try {
    body = { model, ...requestFields(chats) };
    note("");
  } catch (error) {
    note(`Not sent. ${error.message}`);
    return;
  }
  const mine = (running = new AbortController());
  conversation.entries.splice(index, Infinity, ...more);
  conversation.at = Date.now();
  conversation.settings = givenSettings();
  begun();
  const { system, ...fields } = body;
  const asked = chats ? { ...fields, messages: messagesOf(conversation, system) } : { ...fields, prompt: last.prompt };
  const entry = chats ? { role: "assistant", content: "", reasoning: "", calls: [] } : last;
  if (chats) {
    conversation.entries.push(entry);
  }
  keep(conversation);
  const { update } = draw();
  busy(true);
  let failed = false;
  try {
    await answer(chats ? "v1/chat/completions" : "v1/completions", asked, entry, mine.signal, () => following(update));
  } catch (error) {
    if (mine.signal.aborted) {
      entry.figures = [entry.figures, "stopped"].filter(Boolean).join(" · ");
    } else {
      failed = true;
      const silent = chats && !entry.content && !entry.reasoning && !entry.calls.length;
      conversation.entries.splice(-1, silent ? 1 : 0);
      conversation.entries.push({ role: "error", content: error.message });
    }
  }
  keep(conversation);
  if (running === mine) {
    running = null;
    busy(false);
  }
  if (shown() === conversation && !running) {
    following(failed || openCalls(conversation).length ? draw : update);
  }
}

// Show the conversation anew; returns the view of its last entry.
function draw() {
  const conversation = shown();
  const views = conversation.entries.map((entry, index) => {
    const made = view(entry, acts(entry, index, () => made));
    return made;
  });
  byId("log").replaceChildren(...views.map(({ node }) => node));
  const calls = openCalls(conversation);
  if (calls.length && !running) {
    const result = (content, at) => ({ role: "tool", id: calls[at].id, name: calls[at].function.name, content });
    byId("log").append(resultForm(calls, (texts) => go(conversation.entries.length, texts.map(result))));
  }
  byId("log").scrollTop = byId("log").scrollHeight;
  if (document.activeElement === document.body) {
    byId("text").focus({ preventScroll: true }); // the button that had it is gone
  }
  return views[views.length - 1];
}

// An entry's buttons: what they say, and what they do.
function acts(entry, index, made) {
  const edit = () => running || editForm(made().said, entry.content, (text) => go(index, [{ ...entry, content: text }]));
  const again = () => {
    const { entries } = shown();
    const from = entries.slice(0, index + 1).findLastIndex(({ role }) => ASKING.includes(role));
    go(from, [entries[from].role === "completion" ? { ...entries[from], content: "" } : entries[from]]);
  };
  const table = { user: ["Edit", edit], error: ["Send again", again], tool: [] };
  const [words, act] = table[entry.role] ?? ["Regenerate", again];
  return words ? { [words]: act } : {};
}

// Change the log; who has read to its end goes on doing so.
function following(change) {
  const log = byId("log");
  const { scrollTop } = log;
  const follows = log.scrollHeight - scrollTop - log.clientHeight < 40;
  change();
  log.scrollTop = follows ? log.scrollHeight : scrollTop;
}

function busy(is) {
  byId("log").setAttribute("aria-busy", String(is));
  byId("send").disabled = is;
  byId("stop").disabled = !is;
}
