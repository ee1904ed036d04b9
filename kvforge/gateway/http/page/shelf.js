// The list of conversations: new, open, rename, delete, export, and whether this browser keeps them.

import { asJson, asMarkdown, newConversation, titleOf } from "./conversation.js";
import { byId, button, element } from "./dom.js";
import { fillSettings, givenSettings } from "./settings.js";
import { keeps, load, remove, save, setKeeps } from "./store.js";

let all = [];
let current = null;
let model = "";
let opened = () => {};

export const shown = () => current;

// `open` is called whenever another conversation is to be seen.
export function startShelf(facts, open) {
  model = facts.model;
  opened = open;
  byId("shelf").open = matchMedia("(min-width: 68rem)").matches;
  byId("keep").checked = keeps();
  byId("keep").addEventListener("change", switchKeeping);
  byId("new").addEventListener("click", () => show(newConversation(givenSettings())));
  byId("title").addEventListener("change", rename);
  byId("delete").addEventListener("click", drop);
  byId("delete").addEventListener("blur", () => (byId("delete").textContent = "Delete"));
  byId("export-json").addEventListener("click", () => download("json", asJson(model, current)));
  byId("export-markdown").addEventListener("click", () => download("md", asMarkdown(current)));
  byId("settings").addEventListener("change", () => {
    current.settings = givenSettings();
    keep(current);
  });
  addEventListener("storage", () => {
    byId("keep").checked = keeps();
    read();
    list();
  });
  read();
  show(all.find(({ id }) => `#${id}` === location.hash) ?? newConversation(givenSettings()));
}

// Store a conversation that was asked something, and list it.
export function keep(conversation) {
  if (conversation === current && conversation.entries.length && !all.includes(conversation)) {
    all.unshift(conversation);
  }
  if (all.includes(conversation)) {
    store(() => save(conversation));
    list();
  }
}

function read() {
  if (!keeps()) {
    return;
  }
  store(() => {
    const { conversations, broken } = load();
    all = conversations.map((one) => (one.id === current?.id ? current : one)).sort((a, b) => b.at - a.at);
    const some = broken === 1 ? "One stored conversation" : `${broken} stored conversations`;
    say(broken ? `${some} cannot be read: left out here, left as it is in the storage.` : "");
  });
}

function store(change) {
  try {
    if (keeps()) {
      change();
    }
  } catch (error) {
    const full = error.name === "QuotaExceededError";
    say(full ? "The browser's storage is full: what is new is not kept. Delete or export conversations."
             : `The browser gives the page no storage: nothing is kept (${error.message}).`);
  }
}

function say(words) {
  byId("shelf-note").textContent = words;
}

function switchKeeping() {
  const on = byId("keep").checked;
  try {
    setKeeps(on);
    say(on ? "" : "Nothing is stored; these stay until the page is left.");
  } catch {
    byId("keep").checked = keeps();
  }
  all.forEach((one) => store(() => save(one)));
}

function show(conversation) {
  current = conversation;
  fillSettings(current.settings);
  history.replaceState(null, "", `#${current.id}`);
  list();
  opened();
}

function list() {
  const item = (one) => {
    const open = button(titleOf(one), () => show(one));
    open.ariaCurrent = String(one === current);
    return element("li", {}, open);
  };
  byId("list").replaceChildren(...all.map(item));
  if (document.activeElement !== byId("title")) {
    byId("title").value = titleOf(current);
  }
  for (const id of ["delete", "export-json", "export-markdown"]) {
    byId(id).disabled = !all.includes(current);
  }
}

function rename() {
  current.title = byId("title").value.trim();
  keep(current);
}

// The first click asks, the second deletes.
function drop() {
  if (byId("delete").textContent === "Delete") {
    byId("delete").textContent = "Delete for good";
    return;
  }
  byId("delete").textContent = "Delete";
  all = all.filter((one) => one !== current);
  store(() => remove(current.id));
  show(newConversation(givenSettings()));
}

function download(kind, text) {
  const name = titleOf(current).replace(/[^\p{L}\p{N}]+/gu, "-");
  const href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  element("a", { href, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}
