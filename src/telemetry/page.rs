//! `--page-port`: a read-only status page of a cluster and its JSON twin, on 127.0.0.1 of the router's pod
//! alone. The right to forward a port of that pod is the login.
//!
//! A page is computed from what the router has in memory when it is requested. [`world`] has what it is
//! computed from, [`mod@view`] what it shows.

mod frozen;
mod groups;
mod html;
mod images;
mod lanes;
mod list;
mod problems;
mod text;
pub mod view;
mod work;
pub mod world;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use super::http::{plain, refusal, respond, serve_pages};
use view::view;
use world::{Source, World};

/// Requests within this time share what was read.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Characters of a search that are read.
const MAX_SEARCH: usize = 256;

const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
const CSS: &str = "text/css; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Headers of every answer. The page needs its own style and icon, and no script.
const HEADERS: [(&str, &str); 7] = [
    (
        "content-security-policy",
        "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("cache-control", "no-store"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
];

/// Creates the listener of `--page-port`.
pub async fn listen(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await
}

/// Serves the page until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    source: Arc<dyn Source>,
    shutdown: impl Future<Output = ()>,
) {
    let page = Arc::new(Page {
        source,
        max_age: MAX_AGE,
        read: Mutex::default(),
    });
    let answer = move |request: Request<_>| {
        let page = Arc::clone(&page);
        async move {
            let mut response = answer(&request, &page).await;
            for (name, value) in HEADERS {
                let name = HeaderName::from_static(name);
                let value = HeaderValue::from_static(value);
                response.headers_mut().insert(name, value);
            }
            response
        }
    };
    serve_pages(listener, "the status page", answer, shutdown).await;
}

struct Page {
    source: Arc<dyn Source>,
    max_age: Duration,
    /// What was read last, for `max_age`. Requests that arrive while it is read wait for it.
    read: Mutex<Option<(Instant, Arc<World>)>>,
}

impl Page {
    async fn world(self: &Arc<Page>) -> Arc<World> {
        let mut read = self.read.lock().await;
        if let Some((_, world)) = read.as_ref().filter(|(at, _)| at.elapsed() < self.max_age) {
            return Arc::clone(world);
        }
        let world = Arc::new(self.source.world().await);
        let at = Instant::now();
        *read = Some((at, Arc::clone(&world)));
        // Without requests nothing is kept.
        let (page, max_age) = (Arc::downgrade(self), self.max_age);
        tokio::spawn(async move {
            tokio::time::sleep(max_age).await;
            if let Some(page) = page.upgrade() {
                let mut read = page.read.lock().await;
                *read = read.take().filter(|(since, _)| *since != at);
            }
        });
        world
    }

    /// The answer that `render` makes of the present view.
    async fn render(
        self: &Arc<Page>,
        query: &str,
        kind: &'static str,
        render: fn(&view::View) -> Result<String, String>,
    ) -> Response<Full<Bytes>> {
        let (world, search) = (self.world().await, search(query));
        let rendered = tokio::task::spawn_blocking(move || render(&view(&world, &search)));
        let failed = |error: String| {
            tracing::warn!(error, "failed to render the status page");
            plain(StatusCode::INTERNAL_SERVER_ERROR, "failed\n")
        };
        match rendered.await {
            Ok(Ok(text)) => respond(StatusCode::OK, kind, text),
            Ok(Err(error)) => failed(error),
            Err(error) => failed(error.to_string()),
        }
    }
}

async fn answer<B>(request: &Request<B>, page: &Arc<Page>) -> Response<Full<Bytes>> {
    if !is_local(request) {
        let text = "this page is served to localhost, 127.0.0.1 and [::1] alone\n";
        return plain(StatusCode::FORBIDDEN, text);
    }
    if let Some(refusal) = refusal(request) {
        return refusal;
    }
    let query = request.uri().query().unwrap_or_default();
    match request.uri().path() {
        "/" => page.render(query, HTML, html::render).await,
        "/status.json" => page.render(query, JSON, json).await,
        "/status.css" => respond(StatusCode::OK, CSS, html::STYLE.into()),
        "/icon.svg" => respond(StatusCode::OK, SVG, html::ICON.into()),
        _ => plain(
            StatusCode::NOT_FOUND,
            "not found; available paths are / and /status.json\n",
        ),
    }
}

fn json(view: &view::View) -> Result<String, String> {
    serde_json::to_string_pretty(view).map_err(|error| error.to_string())
}

/// Whether a request names this host as the local one. A page of another site that a browser reaches
/// through a forwarded port has another name, whatever address it resolves to.
fn is_local<B>(request: &Request<B>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    let header = hosts.next().and_then(|host| host.to_str().ok());
    let is_one = hosts.next().is_none();
    let in_line = request.uri().authority().map(|it| it.as_str());
    is_one && header.is_some_and(is_local_name) && in_line.is_none_or(is_local_name)
}

fn is_local_name(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port),
        _ => (host, ""),
    };
    let is_known = ["127.0.0.1", "[::1]"].contains(&name) || name.eq_ignore_ascii_case("localhost");
    is_known && port.bytes().all(|c| c.is_ascii_digit())
}

/// The value of `q` in a query, as a form sends it.
fn search(query: &str) -> String {
    let mut pairs = form_urlencoded::parse(query.as_bytes());
    let value = pairs.find(|(key, _)| key == "q").map(|(_, value)| value);
    value.unwrap_or_default().chars().take(MAX_SEARCH).collect()
}

#[cfg(test)]
mod tests;
