// Which view is shown, and the word on the server's state in the corner.

import { ready } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { showMonitor } from "./monitor.js";

const READY_EVERY_MS = 5000;
const VIEWS = ["chat", "monitor"];

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showMonitor(view === "monitor");
  if (view === "chat") byId("text").focus({ preventScroll: true });
}

async function showServer() {
  if (document.hidden) return;
  const place = byId("server");
  let state = "no connection";
  let isReady = false;
  try {
    const answer = await ready();
    isReady = answer.ready;
    state = answer.ready ? "ready" : answer.engine === "ready" ? "stopping" : `engine ${answer.engine}`;
  } catch {
    // Said by the word above.
  }
  place.className = isReady ? "good" : "bad";
  if (place.textContent !== state) place.textContent = state;
}

addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", showServer);
startChat();
showView();
showServer();
setInterval(showServer, READY_EVERY_MS);
