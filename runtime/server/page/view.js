// How a message looks. A view is built once and then brought up to date, so that nothing jumps while an answer comes.
import { describeTiming } from "./answer.js";
import { copyButton, iconButton, make } from "./dom.js";
import { showImages } from "./images.js";
import { showMarkdown } from "./markdown.js";

const SPEAKERS = { user: "You", assistant: "Answer", tool: "Tool" };
const CUT = { length: "The answer was cut at the largest number of tokens." };

/** `actions`: edit(message, text, images), which says if it could be, again(message), show(message), sendResults(message, texts). */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thought = make("div", { class: "text", dir: "auto" });
    this.reasoning = make("details", { class: "reasoning", hidden: true }, make("summary"), this.thought);
    this.text = make("div", { class: "text", dir: "auto" });
    this.images = make("ul", { class: "images", "aria-label": "Images" });
    showImages(this.images, message.images ?? []);
    this.calls = make("div", { class: "calls" });
    this.note = make("p", { class: "note", hidden: true });
    this.problem = make("div", { class: "problem", role: "alert", hidden: true });
    this.results = make("form", { class: "results", hidden: true, submit: (event) => this.sendResults(event) });
    this.words = make("span", { class: "words" });
    this.versions = make("span", { class: "versions", hidden: true });
    this.tools = make("div", { class: "tools" }, this.versions, ...this.makeButtons());
    this.foot = make("div", { class: "foot" }, this.tools, this.words);
    const speaker = make("h2", { class: message.role === "tool" ? "speaker" : "unseen" }, SPEAKERS[message.role]);
    this.body = make("div", { class: "body" }, this.reasoning, this.images, this.text, this.calls, this.note, this.problem, this.results);
    this.element = make("li", { class: `message ${message.role}` }, speaker, this.body, this.foot);
  }

  makeButtons() {
    const { message, actions } = this;
    const isAnswer = message.role === "assistant";
    return [
      copyButton("Copy", () => message.content),
      iconButton("edit", "Edit", () => this.edit()),
      isAnswer ? iconButton("again", "Regenerate", () => actions.again(message)) : null,
    ];
  }

  update({ versions, isLast, isBusy }) {
    const { message } = this;
    this.element.classList.toggle("streaming", message.state === "streaming");
    if (message.role === "assistant") this.updateAnswer(isLast, isBusy);
    else this.text.textContent = message.content;
    this.updateVersions(versions);
    this.tools.inert = isBusy;
  }

  updateAnswer(isLast, isBusy) {
    const { message } = this;
    showMarkdown(this.text, message.content);
    this.updateReasoning();
    this.calls.replaceChildren(...message.toolCalls.map(makeCall));
    this.updateNote();
    this.updateProblem();
    if (this.results.hidden === (isLast && !isBusy && message.toolCalls.length > 0)) this.updateResults();
    this.words.textContent = describeTiming(message.timing);
  }

  updateReasoning() {
    const { reasoning, content, state } = this.message;
    this.reasoning.hidden = !reasoning;
    this.reasoning.firstChild.textContent = state === "streaming" && !content ? "Thinking…" : "Reasoning";
    showMarkdown(this.thought, reasoning);
  }

  updateNote() {
    const { state, finish } = this.message;
    this.note.textContent = state === "stopped" ? "Stopped." : (CUT[finish] ?? "");
    this.note.hidden = !this.note.textContent;
  }

  updateProblem() {
    const { error } = this.message;
    if (this.problem.hidden === !error) return;
    this.problem.hidden = !error;
    this.tools.hidden = Boolean(error) && !this.message.content;
    if (!error) return;
    const retry = make("button", { class: "quiet", type: "button", click: () => this.actions.again(this.message) }, "Try again");
    this.problem.replaceChildren(make("p", {}, error.message), make("small", {}, error.detail), retry);
  }

  updateResults() {
    this.results.hidden = !this.results.hidden;
    const fields = this.message.toolCalls.map((call) =>
      make("label", { class: "wide" }, `Result of ${call.function.name}`, make("textarea", { rows: "2" })));
    this.results.replaceChildren(...fields, make("button", { class: "main" }, "Send results"));
  }

  sendResults(event) {
    event.preventDefault();
    this.actions.sendResults(this.message, Array.from(this.results.querySelectorAll("textarea"), (field) => field.value));
  }

  updateVersions(versions) {
    this.versions.hidden = versions.length < 2;
    if (this.versions.hidden) return;
    const at = versions.indexOf(this.message);
    const step = (name, label, by) => {
      const button = iconButton(name, label, () => this.actions.show(versions[at + by], by));
      button.disabled = !versions[at + by];
      return button;
    };
    this.versions.replaceChildren(
      step("left", "Version before", -1),
      make("span", {}, make("span", { class: "unseen" }, "Version "), `${at + 1}/${versions.length}`),
      step("right", "Version after", 1));
  }

  /** Take the focus where it was when another version was asked for. */
  focusVersions(by) {
    const buttons = [...this.versions.querySelectorAll("button")];
    const wanted = by < 0 ? buttons[0] : buttons[1];
    (wanted.disabled ? buttons.find((button) => !button.disabled) : wanted)?.focus();
  }

  edit() {
    const { message, actions } = this;
    const field = make("textarea", { "aria-label": "Edit the message", dir: "auto", rows: Math.min(12, message.content.split("\n").length + 1) });
    field.value = message.content;
    const images = [...(message.images ?? [])];
    const shelf = make("ul", { class: "images", "aria-label": "Images of this message" });
    showImages(shelf, images, () => field.focus());
    const close = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.tools.querySelector("[aria-label=Edit]").focus();
    };
    const save = (event) => {
      event.preventDefault();
      const isSame = field.value === message.content && images.length === (message.images ?? []).length;
      if (isSame || actions.edit(message, field.value, images)) close();
    };
    const keys = (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(event);
      else return;
      event.stopPropagation();
    };
    const form = make("form", { class: "edit", submit: save, keydown: keys }, shelf, field,
      make("p", { class: "row" },
        make("button", { class: "quiet", type: "button", click: close }, "Cancel"),
        make("button", { class: "main" }, message.role === "user" ? "Send" : "Save")));
    this.body.replaceWith(form);
    this.foot.hidden = true;
    field.focus();
  }
}

function makeCall({ function: { name, arguments: text } }) {
  return make("figure", { class: "code call" },
    make("figcaption", {}, make("span", {}, "Calls ", make("b", {}, name)), copyButton("Copy arguments", () => text)),
    make("pre", { tabindex: "0" }, make("code", {}, indentJson(text))));
}

/** JSON on several lines; what is no JSON (yet) as it is. */
function indentJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
