// The page: one conversation that is shown, one answer that may be under way, and what the buttons do.
import { follow, newAnswer } from "./answer.js";
import { ApiError, readKey, readModels, streamChat, writeKey } from "./api.js";
import {
  addMessage, newConversation, readPath, readVersions, removeLeaf, showVersion, toRequest,
} from "./conversation.js";
import { iconButton, make } from "./dom.js";
import { readImage, showImages } from "./images.js";
import { makeNumbers, NO_SETTINGS, readSettings, showSettings, toParameters } from "./settings.js";
import { openStore } from "./store.js";
import { MessageView } from "./view.js";

const get = (id) => document.getElementById(id);
const prompt = get("prompt");
const scroller = get("scroller");
const parameters = get("parameters");
const narrow = matchMedia("(max-width: 60rem)");
const touch = matchMedia("(pointer: coarse)");

const SAVE_EVERY_MS = 500; // while an answer comes, for whoever closes the page meanwhile
const SHOWN = "llmc.shown"; // the conversation that this tab shows, also after it is loaded again

let store;
let conversations = []; // those with messages
let current = newConversation(NO_SETTINGS);
let running = null; // { conversation, message, controller }
let views = new Map(); // of the messages of the current conversation, by id
let models = []; // { name, chats, sees }
const shelf = []; // images of the message that is being written
let reading = Promise.resolve(); // ends when all that were chosen stand there
const tabs = new BroadcastChannel("llmc"); // the page's other tabs: the id of a conversation that changed, null for all

async function start() {
  makeNumbers(get("numbers"));
  listen();
  showPanel("history", !narrow.matches);
  store = await openStore();
  if (!store.lasts) get("no-history").textContent = "This browser keeps nothing: conversations are gone with this page.";
  conversations = await store.readAll();
  conversations.forEach(endInterrupted);
  const [last] = listNewest();
  const shown = conversations.find((conversation) => conversation.id === sessionStorage.getItem(SHOWN));
  if (last) current = shown ?? newConversation(last.settings);
  tabs.onmessage = ({ data }) => readChange(data);
  showConversation();
  prompt.disabled = false; // it was while the history was read
  if (!touch.matches) prompt.focus();
  await loadModels();
}

/** An answer that was under way when the page was left. */
function endInterrupted(conversation) {
  for (const message of conversation.messages) if (message.state === "streaming") message.state = "stopped";
}

// What is shown --------------------------------------------------------------------------------------------------------

const listNewest = () => [...conversations].sort((a, b) => b.updated - a.updated);

function showConversation() {
  views = new Map();
  showSettings(parameters, current.settings);
  showModel();
  showMessages();
  showHistory();
  scroller.scrollTop = scroller.scrollHeight;
}

function showMessages() {
  const path = readPath(current);
  const shown = path.map(findView);
  const list = get("messages");
  const elements = shown.map((view) => view.element);
  if (elements.length !== list.children.length || elements.some((element, at) => element !== list.children[at])) {
    list.replaceChildren(...elements);
  }
  shown.forEach((view, at) => updateView(view, at === shown.length - 1));
  get("welcome").hidden = path.length > 0;
  get("send").hidden = running !== null;
  get("stop").hidden = running === null;
  get("messages").setAttribute("aria-busy", running?.conversation === current);
  // A button that had the focus may be gone; on touch screens the field would bring up the keyboard.
  if (document.activeElement === document.body && !touch.matches) prompt.focus();
}

function updateView(view, isLast) {
  view.update({ versions: readVersions(current, view.message), isLast, isBusy: running !== null });
}

function findView(message) {
  if (!views.has(message.id)) views.set(message.id, new MessageView(message, { edit, again, show, sendResults }));
  return views.get(message.id);
}

/** Show what came since the last frame, and stay at the end if that is where the reader is. */
function follower() {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      if (running?.conversation === current) keepEnd(() => updateView(findView(running.message), true));
    });
  };
}

const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;

function keepEnd(change) {
  const stay = isAtEnd();
  change();
  if (stay) scroller.scrollTop = scroller.scrollHeight;
  get("to-end").hidden = isAtEnd();
}

function showHistory() {
  const entries = listNewest().map((conversation) => {
    const open = make("button", { type: "button", class: "open", click: () => openConversation(conversation) }, conversation.title || "Untitled");
    if (conversation === current) open.setAttribute("aria-current", "true");
    const busy = running?.conversation === conversation;
    const rename = iconButton("edit", `Rename “${conversation.title}”`, () => renameConversation(conversation));
    rename.dataset.rename = conversation.id;
    return make("li", { class: busy ? "busy" : null }, open, rename,
      iconButton("delete", `Delete “${conversation.title}”`, () => removeConversation(conversation)));
  });
  get("conversations").replaceChildren(...entries);
  get("no-history").hidden = store.lasts && entries.length > 0;
  get("export").disabled = get("delete-all").disabled = !entries.length;
}

function openConversation(conversation) {
  current = conversation;
  sessionStorage.setItem(SHOWN, current.id);
  showConversation();
  if (narrow.matches) showPanel("history", false);
  prompt.focus();
}

// Conversations --------------------------------------------------------------------------------------------------------

const startConversation = () => openConversation(newConversation(current.settings));

async function save(conversation) {
  if (!conversation.messages.length || conversation.isRemoved) return;
  if (!conversations.includes(conversation)) conversations.push(conversation);
  try {
    await store.write(conversation);
    tabs.postMessage(conversation.id);
  } catch (error) {
    notify(`The browser did not keep this conversation: ${error.message}`);
  }
}

async function removeConversation(conversation) {
  if (!(await confirm(`Delete “${conversation.title}”?`))) return;
  await drop([conversation]);
  await store.remove(conversation.id);
  tabs.postMessage(null);
}

async function removeAll() {
  if (!(await confirm(`Delete all conversations?`))) return;
  await drop(conversations);
  await store.clear();
  tabs.postMessage(null);
}

/** Take over what another tab changed; an answer that is under way here goes on. */
async function readChange(id) {
  const changed = id === null ? await store.readAll() : [await store.read(id)].filter(Boolean);
  const kept = id === null ? [] : conversations.filter((conversation) => conversation.id !== id);
  conversations = [...kept, ...changed.map((read) => (running?.conversation.id === read.id ? running.conversation : read))];
  const now = conversations.find((conversation) => conversation.id === current.id);
  if (!now && current.messages.length && running?.conversation !== current) return startConversation();
  if (now && now !== current) {
    current = now;
    views = new Map();
    keepEnd(showMessages);
  }
  showHistory();
}

/** Forget conversations; an answer that one of them waits for is stopped and not kept. */
async function drop(dropped) {
  for (const conversation of dropped) conversation.isRemoved = true;
  if (running?.conversation.isRemoved) running.controller.abort();
  conversations = conversations.filter((conversation) => !conversation.isRemoved);
  if (current.isRemoved) startConversation();
  else showHistory();
}

async function renameConversation(conversation) {
  get("title").value = conversation.title;
  const named = await asked(get("rename-dialog"));
  const title = get("title").value.trim();
  if (!named || !title || conversation.isRemoved) return;
  conversation.title = title;
  await save(conversation);
  showHistory();
  get("conversations").querySelector(`[data-rename="${CSS.escape(conversation.id)}"]`)?.focus();
}

function exportAll() {
  const url = URL.createObjectURL(new Blob([JSON.stringify(listNewest(), null, 2)], { type: "application/json" }));
  make("a", { href: url, download: "llmc-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// Messages -------------------------------------------------------------------------------------------------------------

async function send(event) {
  event?.preventDefault();
  await reading;
  const text = prompt.value.trim();
  if (running || !(text || shelf.length)) return;
  if (ask(text, [...shelf], current.leaf)) {
    prompt.value = "";
    fitPrompt();
    shelf.length = 0;
    showShelf();
  }
}

const showShelf = () => showImages(get("shelf"), shelf, () => prompt.focus());

function addImages(files) {
  reading = reading.then(() => readImages(files));
}

async function readImages(files) {
  const problems = [];
  for (const file of files) {
    try {
      shelf.push(await readImage(file));
      announce(`“${file.name}” was added.`);
    } catch (error) {
      problems.push(`“${file.name}” was left out: ${error.message}.`);
    }
  }
  keepEnd(() => {
    notify(problems.join(" "));
    showShelf();
  });
}

function addChosen() {
  addImages([...get("image-file").files]);
  get("image-file").value = ""; // or the same file could not be chosen again
}

/** Take files that are dropped or pasted where the model sees. Copies from documents are text with a picture of it. */
function takeFiles(event) {
  const { types, files } = event.dataTransfer ?? event.clipboardData;
  const isText = event.type === "paste" && ["text/plain", "text/html"].every((type) => types.includes(type));
  if (get("attach").hidden || !types.includes("Files") || isText) return;
  event.preventDefault();
  if (event.type !== "dragover") addImages([...files]);
}

/** Add a message of the user's and have it answered; false where the settings cannot be sent. */
function ask(content, images, parent) {
  const request = readRequest();
  if (!request) return false;
  answer(addMessage(current, parent, { role: "user", content, ...(images.length && { images }) }).id, request);
  return true;
}

/** An edited question is asked anew, an edited answer is kept as it stands; false if neither can be now. */
function edit(message, text, images) {
  if (running) {
    notify("An answer is under way; wait for its end, or stop it.");
    return false;
  }
  if (message.role === "user") return ask(text, images, message.parent);
  const { role, model, toolCalls, toolCallId } = message;
  addMessage(current, message.parent, { ...newAnswer(model), role, toolCalls, toolCallId, content: text, state: "done" });
  save(current);
  showMessages();
  return true;
}

/** Another answer beside this one; one that never began is replaced. */
function again(message) {
  const request = !running && readRequest();
  if (!request) return;
  const isEmpty = !message.content && !message.reasoning && !message.toolCalls.length;
  if (isEmpty && current.leaf === message.id) removeLeaf(current, message);
  answer(message.parent, request);
}

function show(message, by) {
  showVersion(current, message);
  save(current);
  showMessages();
  findView(message).focusVersions(by);
}

function sendResults(message, texts) {
  const request = !running && readRequest();
  if (!request) return;
  let parent = message.id;
  message.toolCalls.forEach((call, at) => {
    parent = addMessage(current, parent, { role: "tool", toolCallId: call.id, content: texts[at] }).id;
  });
  answer(parent, request);
}

/** What every request of this conversation says; null, and a notice, where a setting is wrong. */
function readRequest() {
  notify("");
  current.settings = readSettings(parameters, get("model").value || current.settings.model);
  try {
    return { model: current.settings.model, ...toParameters(current.settings) };
  } catch (error) {
    notify(error.message);
    showPanel("settings", true);
    return null;
  }
}

async function answer(parent, request) {
  const conversation = current;
  const messages = toRequest(conversation, parent);
  const message = addMessage(conversation, parent, newAnswer(request.model));
  const controller = new AbortController();
  running = { conversation, message, controller };
  sessionStorage.setItem(SHOWN, conversation.id);
  announce("The model is answering.");
  save(conversation);
  showMessages();
  showHistory();
  scroller.scrollTop = scroller.scrollHeight;
  const error = await stream({ ...request, messages }, conversation, message, controller.signal);
  running = null;
  await save(conversation);
  if (conversation === current) keepEnd(showMessages);
  else showMessages();
  showHistory();
  if (error?.status === 401) askForKey(error.message, () => conversation === current && again(message));
}

/** Fill an answer until its stream ends; gives back what went wrong. */
async function stream(body, conversation, message, signal) {
  const absorb = follow(message);
  const refresh = follower();
  let saving = null;
  try {
    for await (const chunk of streamChat(body, signal)) {
      absorb(chunk);
      refresh();
      saving ??= setTimeout(() => {
        saving = null;
        save(conversation);
      }, SAVE_EVERY_MS);
    }
    message.state = "done";
    announce(`Answer: ${message.content || "a call of a tool"}`);
    return null;
  } catch (error) {
    message.state = signal.aborted ? "stopped" : "failed";
    announce(signal.aborted ? "Stopped." : "");
    if (signal.aborted) return null;
    const known = error instanceof ApiError ? error : new ApiError(`The page failed: ${error.message}`);
    message.error = { message: known.message, detail: known.detail };
    return known;
  }
}

const stop = () => running?.controller.abort();

// The server -----------------------------------------------------------------------------------------------------------

async function loadModels() {
  try {
    models = await readModels();
    get("model").replaceChildren(...models.map(({ name }) => make("option", { value: name }, name)));
    get("model").disabled = false;
    notify("");
    showModel();
  } catch (error) {
    if (error.status === 401) askForKey(error.message, loadModels);
    else notify(`The models cannot be listed: ${error.message}`, loadModels);
  }
}

function showModel() {
  const select = get("model");
  const names = Array.from(select.options, (option) => option.value);
  if (names.includes(current.settings.model)) select.value = current.settings.model;
  select.title = select.value;
  const { chats, sees } = models.find(({ name }) => name === select.value) ?? { chats: true, sees: false };
  get("send").disabled = !chats;
  get("attach").hidden = !sees;
  if (!chats) notify(`“${select.value}” has no chat template, so it cannot chat; use it in a terminal with: llmc run`);
}

let retryWithKey = () => {}; // what to do again with the key that was asked for

function askForKey(reason, retry) {
  retryWithKey = retry;
  get("key-reason").textContent = reason;
  get("key").value = readKey();
  if (!get("key-dialog").open) openDialog(get("key-dialog"));
}

function useKey() {
  if (get("key-dialog").returnValue !== "ok") return;
  writeKey(get("key").value.trim());
  if (get("model").disabled && retryWithKey !== loadModels) loadModels();
  retryWithKey();
}

// Words and panels -----------------------------------------------------------------------------------------------------

function announce(text) {
  get("announcer").textContent = text;
}

function notify(text, retry = null) {
  get("notice").replaceChildren(text);
  if (retry) get("notice").append(" ", make("button", { class: "quiet", type: "button", click: retry }, "Try again"));
}

function confirm(question) {
  get("confirm-title").textContent = question;
  return asked(get("confirm-dialog"));
}

/** Open a dialog; true once it is left by its main button. */
function asked(dialog) {
  openDialog(dialog);
  const turn = dialog.dataset.turn = String(Number(dialog.dataset.turn ?? 0) + 1);
  return new Promise((resolve) => {
    dialog.addEventListener("close", function closed() {
      if (dialog.open && turn === dialog.dataset.turn) return; // the event of the time before, which came late
      dialog.removeEventListener("close", closed);
      resolve(turn === dialog.dataset.turn && dialog.returnValue === "ok");
    });
  });
}

/** Open a dialog; left by Esc or Cancel, it returns nothing, whatever it did before. */
function openDialog(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
}

const PANELS = ["history", "settings"];

/** Open or close a panel; on a narrow screen it covers the rest, which cannot be reached meanwhile. */
function showPanel(name, open) {
  get(name).hidden = !open;
  if (open && narrow.matches) for (const other of PANELS) if (other !== name) get(other).hidden = true;
  coverRest();
}

function coverRest() {
  for (const name of PANELS) get(`${name}-toggle`).setAttribute("aria-expanded", !get(name).hidden);
  const isCovered = narrow.matches && PANELS.some((name) => !get(name).hidden);
  get("shade").hidden = !isCovered;
  for (const rest of document.querySelectorAll("main, header")) rest.inert = isCovered;
}

function togglePanel(name) {
  const open = get(name).hidden;
  showPanel(name, open);
  if (open) get(name).querySelector(narrow.matches ? ".close" : "button:not(.close), textarea").focus();
  else get(`${name}-toggle`).focus();
}

/** Close the panel that covers the page, if any. */
function closeCover() {
  const covering = PANELS.find((name) => narrow.matches && !get(name).hidden);
  if (covering) togglePanel(covering);
  return Boolean(covering);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// Keys and clicks ------------------------------------------------------------------------------------------------------

const SHORTCUTS = {
  KeyN: startConversation,
  KeyH: () => togglePanel("history"),
  KeyP: () => togglePanel("settings"),
  KeyM: () => prompt.focus(),
};

function onKey(event) {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  if (event.key === "Escape" && !closeCover()) stop();
  const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey && SHORTCUTS[event.code];
  if (!shortcut) return;
  event.preventDefault();
  shortcut();
}

function onPromptKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && !touch.matches) send(event);
  if (event.key === "ArrowUp" && !prompt.value && !running) editLast(event);
}

function editLast(event) {
  const last = readPath(current).findLast((message) => message.role === "user");
  if (!last) return;
  event.preventDefault();
  findView(last).edit();
}

function listen() {
  const clicks = {
    new: startConversation,
    export: exportAll,
    attach: () => get("image-file").click(),
    "delete-all": removeAll,
    stop,
    shade: closeCover,
    "history-toggle": () => togglePanel("history"),
    "settings-toggle": () => togglePanel("settings"),
    "key-button": () => askForKey("", loadModels),
    "to-end": () => scroller.scrollTo({ top: scroller.scrollHeight }),
    reset: () => showSettings(parameters, { ...NO_SETTINGS, system: parameters.elements.system.value }),
  };
  for (const [id, click] of Object.entries(clicks)) get(id).addEventListener("click", click);
  for (const name of PANELS) get(name).querySelector(".close").addEventListener("click", () => togglePanel(name));
  for (const cancel of document.querySelectorAll(".cancel")) {
    cancel.addEventListener("click", () => cancel.closest("dialog").close());
  }
  get("composer").addEventListener("submit", send);
  get("image-file").addEventListener("change", addChosen);
  get("key-dialog").addEventListener("close", useKey);
  parameters.addEventListener("submit", (event) => event.preventDefault());
  parameters.addEventListener("change", keepSettings);
  get("model").addEventListener("change", keepSettings);
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", onPromptKey);
  prompt.addEventListener("paste", takeFiles);
  for (const name of ["dragover", "drop"]) document.addEventListener(name, takeFiles);
  scroller.addEventListener("scroll", () => (get("to-end").hidden = isAtEnd()), { passive: true });
  document.addEventListener("keydown", onKey);
  narrow.addEventListener("change", () => showPanel("history", !narrow.matches));
}

function keepSettings() {
  current.settings = readSettings(parameters, get("model").value);
  showModel();
  save(current);
}

start();
