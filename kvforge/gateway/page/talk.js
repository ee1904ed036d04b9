// Chat and completion, streamed. What anybody wrote is only ever put in place as text.

import { events } from "./api.js";

const NAMES = { user: "You", assistant: "Model", completion: "Completion", error: "Error" };
const byId = (id) => document.getElementById(id);
let model = "";
let messages = [];
let open = null;

export function startTalk(facts) {
  model = facts.model;
  byId("max-tokens").max = facts.max_model_len;
  byId("temperature").placeholder = facts.temperature;
  if (!facts.chat) {
    byId("mode-chat").disabled = true;
    byId("mode-complete").checked = true;
    note("This model has no chat template, so it completes texts.");
  }
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && open?.abort());
  byId("stop").addEventListener("click", () => open?.abort());
  byId("clear").addEventListener("click", clear);
}

function note(text) {
  byId("talk-note").textContent = text;
  byId("talk-note").hidden = false;
}

function clear() {
  open?.abort();
  messages = [];
  byId("log").replaceChildren();
  byId("text").focus();
}

function entry(kind, text) {
  const item = document.createElement("li");
  const who = document.createElement("div");
  const said = document.createElement("div");
  const figures = document.createElement("div");
  item.className = kind;
  who.className = "who";
  said.className = "said";
  figures.className = "note";
  who.textContent = NAMES[kind];
  said.append(text);
  item.append(who, said, figures);
  byId("log").append(item);
  return { said, figures };
}

function request(text) {
  const body = { model, temperature: byId("temperature").valueAsNumber, max_tokens: byId("max-tokens").valueAsNumber };
  for (const name of ["temperature", "max_tokens"]) {
    if (Number.isNaN(body[name])) {
      delete body[name];
    }
  }
  if (byId("mode-complete").checked) {
    return ["v1/completions", { ...body, prompt: text }];
  }
  const system = byId("system").value;
  const first = system ? [{ role: "system", content: system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...first, ...messages, { role: "user", content: text }] }];
}

// The text of a fold before the answer, in which its reasoning is.
function folded(answer) {
  const fold = document.createElement("details");
  const title = document.createElement("summary");
  title.textContent = "Reasoning";
  const text = document.createTextNode("");
  fold.append(title, text);
  answer.before(fold);
  return text;
}

async function ask() {
  const text = byId("text").value;
  if (open || !model || !text.trim()) {
    return;
  }
  const [path, body] = request(text);
  const log = byId("log");
  const chats = Boolean(body.messages);
  if (chats) {
    entry("user", text);
  }
  const { said, figures } = entry(chats ? "assistant" : "completion", "");
  if (!chats) {
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = text;
    said.append(given);
  }
  const answer = document.createTextNode("");
  said.append(answer);
  let thought = null;
  log.scrollTop = log.scrollHeight;
  byId("text").value = "";
  busy(true);
  const mine = (open = new AbortController());
  const times = { asked: performance.now(), first: 0, usage: null, reason: "" };
  // Each change of a long text is laid out anew: several pieces are one.
  let pending = "";
  let timer = 0;
  const write = () => {
    timer = 0;
    following(() => (answer.data += pending));
    pending = "";
  };
  try {
    for await (const event of events(path, body, mine.signal)) {
      times.usage = event.usage ?? times.usage;
      const choice = event.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      const reasoning = choice?.delta?.reasoning_content;
      if (reasoning) {
        times.first ||= performance.now();
        thought ||= folded(answer);
        following(() => (thought.data += reasoning));
      }
      times.reason = choice?.finish_reason ?? times.reason;
      if (piece) {
        times.first ||= performance.now();
        pending += piece;
        timer ||= setTimeout(write, 50);
      }
    }
    write();
    following(() => (figures.textContent = summary(times)));
  } catch (error) {
    write();
    if (mine.signal.aborted) {
      figures.textContent = "stopped";
    } else {
      following(() => entry("error", error.message));
    }
  }
  clearTimeout(timer);
  if (chats && answer.data && said.isConnected) {
    messages.push({ role: "user", content: text }, { role: "assistant", content: answer.data });
  }
  open = null;
  busy(false);
}

// Change the log; who has read to its end goes on doing so.
function following(change) {
  const log = byId("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (follows) {
    log.scrollTop = log.scrollHeight;
  }
}

function busy(is) {
  byId("log").setAttribute("aria-busy", String(is));
  byId("send").disabled = is;
  byId("stop").disabled = !is;
}

function summary({ asked, first, usage, reason }) {
  const parts = [];
  if (usage) {
    parts.push(`${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out`);
  }
  if (first) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`first after ${((first - asked) / 1000).toFixed(2)} s`);
    if (usage?.completion_tokens > 1 && seconds > 0) {
      parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} a second`);
    }
  }
  return [...parts, ...(reason === "length" ? ["cut off at the limit"] : [])].join(" · ");
}
