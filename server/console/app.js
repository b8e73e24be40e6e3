// The page: views, theme, keyboard, the key, and the feed that must come back after a loss.

import { HttpError, key } from "./api.js";
import { repaint } from "./charts.js";
import { byId, el, PHASES, setText } from "./format.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const VIEWS = ["live", "requests", "play"];
const THEME = "paceline-theme";
const live = new Live();
const playground = new Playground(live);

function choose(view) {
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    byId(`tab-${name}`).setAttribute("aria-selected", `${name === view}`);
  }
  history.replaceState(null, "", `#${view}`);
}

// --- theme ------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const wanted = localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
  repaint();
  live.map.draw();
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme === "dark";
  localStorage.setItem(THEME, dark ? "light" : "dark");
  applyTheme();
}

// --- keyboard ---------------------------------------------------------------------------------

function onKey(event) {
  if (event.key === "Escape") playground.stop();
  const writing = /^(INPUT|TEXTAREA)$/.test(event.target.tagName);
  if (writing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (/^[123]$/.test(event.key)) choose(VIEWS[Number(event.key) - 1]);
  if (event.key === "t") switchTheme();
  if (event.key === "/") {
    event.preventDefault();
    choose("play");
    byId("prompt").focus();
  }
}

// --- the feed ---------------------------------------------------------------------------------

function askForKey(message) {
  setText("login-error", message);
  const dialog = byId("login");
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key.set(byId("key").value.trim());
      resolve();
    }, { once: true });
  });
}

async function follow() {
  const visible = () => new Promise((resolve) => {
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
  for (;;) {
    // Nobody watches a hidden page, so the server need not work for it.
    while (document.hidden) await visible();
    const abort = new AbortController();
    const hide = () => document.hidden && abort.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      await live.follow(abort.signal);
    } catch (error) {
      if (error instanceof HttpError && error.status === 401) {
        await askForKey(key.get() ? "This key is not known here." : "");
        continue;
      }
      if (error instanceof HttpError && error.status === 403) {
        const before = key.get();
        await askForKey("The live view is for an operator's key. The playground takes this one too.");
        if (key.get() !== before) continue;
        byId("state").dataset.state = "lost";
        setText("state", "playground only");
        choose("play");
        return;
      }
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (!document.hidden) {
      byId("state").dataset.state = "lost";
      setText("state", "no connection");
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => choose(view));
byId("theme").addEventListener("click", switchTheme);
system.addEventListener("change", applyTheme);
document.addEventListener("keydown", onKey);
byId("phase-legend").append(
  ...PHASES.map((name) =>
    el("span", { "data-p": name }, el("i", { class: "key", style: "background:var(--p)" }), name.replace("_", " "))),
);
const asked = location.hash.slice(1);
applyTheme();
addEventListener("load", () => {
  // Charts measure their place, so every view is shown while they are made.
  for (const name of VIEWS) byId(name).hidden = false;
  live.makeCharts();
  playground.makeCharts();
  choose(VIEWS.includes(asked) ? asked : "live");
  follow();
});
