// The search of the documentation's site in a page that is opened as a file: browsers start no
// worker from a file, so an invisible frame takes its place. The theme would load such a script
// from another server.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.hidden = true;
    this.inner = frame.contentWindow;
    addEventListener("message", (event) => {
      if (event.source !== this.inner) return;
      this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      if (this.onmessage) this.onmessage(event);
    });
    const answer = (data) => parent.postMessage(data, "*");
    const load = (...urls) => urls.reduce((before, source) => before.then(() => new Promise((done, failed) => {
      const script = document.createElement("script");
      Object.assign(script, { src: source, onload: done, onerror: failed });
      document.body.appendChild(script);
    })), Promise.resolve());
    this.inner.document.open();
    this.inner.document.write(`<body><script>postMessage=${answer};importScripts=${load}</scr` +
      `ipt><script src="${url}"></scr` + "ipt></body>");
    this.inner.document.close();
    this.ready = new Promise((done) => { this.inner.onload = done; });
  }

  postMessage(data) {
    // the frame's own postMessage leads here
    this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {}
}
if (location.protocol === "file:") window.Worker = FrameWorker;
