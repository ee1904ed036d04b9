// Conversations in this browser's storage, each under a key of its own, so that two tabs do not overwrite each other's.

const KEEP = "kvforge.keep";
const PREFIX = "kvforge.conversation.";
const ROLES = ["user", "assistant", "tool", "completion", "error"];
const isText = (value) => typeof value === "string";

export function keeps() {
  try {
    return localStorage.getItem(KEEP) !== "no";
  } catch {
    return false;
  }
}

// All that is stored, and how many keys hold something else. Throws where the browser gives no storage.
export function load() {
  const found = keys().map((key) => read(localStorage.getItem(key)));
  return { conversations: found.filter(Boolean), broken: found.filter((one) => !one).length };
}

// Throws where the storage is full or there is none.
export function save(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

// Whether to keep anything; where not, only that is stored.
export function setKeeps(on) {
  if (on) {
    localStorage.removeItem(KEEP);
  } else {
    keys().forEach((key) => localStorage.removeItem(key));
    localStorage.setItem(KEEP, "no");
  }
}

const keys = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));

function read(text) {
  try {
    const found = JSON.parse(text);
    const { id, title, at, settings, entries } = found;
    const whole = isText(id) && isText(title) && Number.isFinite(at) && Object.values(settings).every(isText);
    return whole && entries.every(isEntry) ? found : null;
  } catch {
    return null;
  }
}

function isEntry({ role, content, reasoning = "", figures = "", prompt = "", id = "", name = "", calls = [] }) {
  const texts = [content, reasoning, figures, prompt, id, name];
  const called = ({ id, function: { name, arguments: given } }) => [id, name, given].every(isText);
  return ROLES.includes(role) && texts.every(isText) && calls.every(called);
}
