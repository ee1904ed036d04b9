// The server's own numbers, read once a second while the page is seen.

import { get } from "./api.js";
import { byId } from "./dom.js";
import { rate, seconds, whole } from "./figures.js";

const PERIOD_MS = 1000;
const KEPT_MS = 60000;
const RATE_MS = 3500;
const MAX_CELLS = 240;
let kept = [];

export function startLive(facts) {
  if (!facts.metrics) {
    stopped("This gateway does not know the server's metrics port: start it with --metrics.");
    return;
  }
  setInterval(() => document.hidden || look(), PERIOD_MS);
  look();
}

function stopped(why) {
  byId("live-note").textContent = why;
  byId("live-note").hidden = !why;
  byId("numbers").hidden = Boolean(why) && kept.length === 0;
}

async function look() {
  try {
    const response = await get("page/metrics");
    if (!response.ok) {
      throw new Error();
    }
    show(parse(await response.text()));
    stopped("");
  } catch {
    stopped("The server gives no numbers at the moment.");
  }
}

// Prometheus' text as a function from a name and its labels to a number, the sum of all that fit.
function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (match) {
      const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="([^"]*)"/g)].map((pair) => pair.slice(1)));
      found.set(match[1], [...(found.get(match[1]) ?? []), { labels, value: Number(match[3]) }]);
    }
  }
  return (name, wanted = {}) =>
    (found.get(name) ?? [])
      .filter(({ labels }) => Object.entries(wanted).every(([label, value]) => labels[label] === value))
      .reduce((sum, { value }) => sum + value, 0);
}

function show(number) {
  const requests = (type) => number("nv_trt_llm_request_metrics", { request_type: type });
  const pages = (type) => number("nv_trt_llm_kv_cache_block_metrics", { kv_cache_block_type: type });
  const now = {
    at: performance.now(),
    tokens: number("kvforge_generated_tokens_total"),
    first: number("kvforge_time_to_first_token_seconds_sum"),
    firsts: number("kvforge_time_to_first_token_seconds_count"),
    drafted: number("kvforge_draft_tokens_total"),
    accepted: number("kvforge_accepted_draft_tokens_total"),
  };
  if (kept.length && now.tokens < kept[kept.length - 1].tokens) {
    kept = []; // the server began anew
  }
  kept = [...kept.filter(({ at }) => now.at - at <= KEPT_MS), now];
  byId("running").textContent = requests("scheduled");
  byId("waiting").textContent = requests("waiting");
  showRate(now);
  showShare("ttft", now, "first", "firsts", seconds, "no request yet");
  showShare("drafts", now, "accepted", "drafted", (share) => `${Math.round(share * 100)} %`, "no drafts");
  showMemory(number);
  showPages(pages("used"), pages("max"), pages("tokens_per"));
}

// Tokens/s up to a sample. The server counts once a second, too, so one period alone would be all or nothing.
function rateAt(sample) {
  const since = kept.find(({ at }) => sample.at - at <= RATE_MS);
  return { at: sample.at, rate: rate(sample.tokens - since.tokens, sample.at - since.at) };
}

function showRate(now) {
  const rates = kept.slice(1).map(rateAt);
  byId("rate").textContent = rates.length ? whole(rates[rates.length - 1].rate) : "–";
  const most = Math.max(1, ...rates.map(({ rate }) => rate));
  const points = rates.map(({ at, rate }) => `${300 - ((now.at - at) * 300) / KEPT_MS},${58 - (rate * 56) / most}`);
  byId("spark-line").setAttribute("points", points.join(" "));
  byId("spark-note").textContent = rates.length ? `peak ${whole(most)}` : "";
}

// One sum over another: of the last minute where there was something, else of all time.
function showShare(id, now, over, under, words, nothing) {
  const before = kept[0];
  const recent = now[under] > before[under];
  const [sum, count] = recent ? [now[over] - before[over], now[under] - before[under]] : [now[over], now[under]];
  byId(id).textContent = count ? words(sum / count) : "–";
  byId(`${id}-note`).textContent = !count ? nothing : recent ? "mean, last minute" : "mean since the start";
}

function showMemory(number) {
  const bytes = (family) => number(family, { memory: "device" }) + number(family, { memory: "host" });
  const used = bytes("kvforge_kv_cache_used_bytes");
  byId("memory").textContent = size(used);
  byId("memory-note").textContent = `of ${size(bytes("kvforge_kv_cache_bytes"))}`;
}

function size(bytes) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(bytes, 1)) / 10));
  return `${(bytes / 1024 ** power).toFixed(power && bytes / 1024 ** power < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function showPages(used, max, tokens) {
  const map = byId("pages");
  const count = Math.min(max, MAX_CELLS);
  while (map.children.length > count) {
    map.lastChild.remove();
  }
  while (map.children.length < count) {
    map.append(document.createElement("span"));
  }
  const lit = max ? Math.ceil((used * count) / max) : 0;
  [...map.children].forEach((cell, index) => cell.classList.toggle("used", index < lit));
  const each = max > count ? `; each square ≈ ${Math.round(max / count)} pages` : "";
  map.setAttribute("aria-label", `${used} of ${max} pages in use`);
  byId("pages-note").textContent = `${used} of ${max} pages in use, ${tokens} tokens each${each}`;
}
