// What a reader does on the site, done in a frame of a real browser. Run by test_site.py, which
// fills in the pages and receives the findings.
const PAGES = __PAGES__;
const frame = document.createElement("iframe");
frame.style.border = "0";
document.body.append(frame);

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

async function until(what, condition) {
  for (let tries = 0; tries < 300; tries++) {
    const found = condition();
    if (found) return found;
    await wait(100);
  }
  throw new Error(`not seen in 30 s: ${what}`);
}

async function open(page, width) {
  frame.width = width;
  frame.height = 900;
  const loaded = new Promise((done) => (frame.onload = done));
  frame.src = page;
  await loaded;
  await frame.contentDocument.fonts.ready;
  return frame.contentDocument;
}

const all = (page, selector) => [...page.querySelectorAll(selector)];
const words = (element) => element.textContent.trim().replace(/\s+/g, " ");

async function look() {
  const seen = {};
  let page = await open("/tutorial/", 1280);
  seen.kinds = all(page, ".md-nav--primary .md-nav__item--section > .md-nav__link").map(words);

  const copy = await until("buttons to copy code", () => {
    const found = all(page, "button[data-clipboard-target], button[data-md-type=copy]");
    return found.length && found;
  });
  seen.copyable = copy.length === all(page, ".highlight pre").length;

  const session = all(page, ".highlight code").find((code) => code.textContent.startsWith("$ git"));
  session.setAttribute("data-md-copying", ""); // as the button does
  seen.copied = session.innerText.trim().split("\n");
  session.removeAttribute("data-md-copying");

  const query = page.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "ordering key";
  for (const name of ["focus", "input", "keyup"]) {
    query.dispatchEvent(new frame.contentWindow.Event(name, { bubbles: true }));
  }
  const found = await until("results of the search", () => {
    const items = all(page, ".md-search-result__item a");
    return items.length && items;
  });
  seen.found = found.map((link) => new URL(link.href).pathname);

  const color = () => frame.contentWindow.getComputedStyle(page.body).backgroundColor;
  const before = color();
  all(page, "form[data-md-component=palette] label").find((label) => !label.hidden).click();
  await until("another color scheme", () => color() !== before);
  seen.schemes = [before, color()];

  seen.wide = [];
  seen.broken = [];
  seen.foreign = [];
  for (const path of PAGES) {
    page = await open(path, 390);
    if (page.documentElement.scrollWidth > 390) seen.wide.push([path, page.documentElement.scrollWidth]);
    for (const image of all(page, "article img")) {
      image.loading = "eager";
      await image.decode().catch(() => seen.broken.push(image.src));
    }
    for (const { name } of frame.contentWindow.performance.getEntriesByType("resource")) {
      if (!name.startsWith(location.origin) && !name.startsWith("data:")) seen.foreign.push(name);
    }
  }
  const drawer = page.querySelector("label[for=__drawer]");
  seen.menu = frame.contentWindow.getComputedStyle(drawer).display !== "none";
  return seen;
}

look()
  .catch((error) => ({ error: String(error) }))
  .then((seen) => fetch("/seen", { method: "POST", body: JSON.stringify(seen) }));
