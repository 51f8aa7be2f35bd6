//! A server of read-only pages over HTTP, and those of `--metrics-address`: `/metrics`, `/healthz` and
//! `/readyz`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};

use super::Metrics;

/// Content type of OpenMetrics text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// A client that sends no complete header in this time is disconnected.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of connections, in total and per client address. For one more, the oldest is
/// closed, in total or of that address.
const MAX_CONNECTIONS: usize = 64;
const MAX_CONNECTIONS_OF_ONE_ADDRESS: usize = 16;

/// Prometheus gives up after 10 s; by then it should at least have the old values.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether calls are served now. [`crate::server::serve`] sets this.
#[derive(Debug, Default)]
pub struct Readiness(AtomicBool);

impl Readiness {
    /// Sets whether calls are served.
    pub fn set(&self, serving: bool) {
        self.0.store(serving, Ordering::Release);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Creates the listener of `--metrics-address`.
pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves metrics and readiness until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    shutdown: impl Future<Output = ()>,
) {
    let page = move |request: Request<Incoming>| {
        let metrics = metrics.clone();
        async move { answer(&request, metrics).await }
    };
    serve_pages(listener, "metrics", page, shutdown).await;
}

/// Serves requests until `shutdown`. `page` answers them.
pub(super) async fn serve_pages<F, A>(
    listener: TcpListener,
    what: &'static str,
    page: F,
    shutdown: impl Future<Output = ()>,
) where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut open: VecDeque<(IpAddr, AbortHandle)> = VecDeque::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let (stream, from) = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                // Usually no descriptors are left, and only waiting helps.
                Err(error) => {
                    tracing::warn!(%error, what, "failed to accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        open.retain(|(_, connection)| !connection.is_finished());
        let is_its = |(ip, _): &(IpAddr, AbortHandle)| *ip == from.ip();
        let crowded =
            open.iter().filter(|one| is_its(one)).count() >= MAX_CONNECTIONS_OF_ONE_ADDRESS;
        let oldest = match crowded {
            true => open.iter().position(is_its),
            false => (open.len() >= MAX_CONNECTIONS).then_some(0),
        };
        if let Some((_, oldest)) = oldest.and_then(|at| open.remove(at)) {
            oldest.abort();
        }
        let page = page.clone();
        let connection = connections.spawn(async move {
            let service = service_fn(|request| {
                let answer = page(request);
                async move { Ok::<_, Infallible>(answer.await) }
            });
            // An error here means that the client disconnected.
            let _ = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        open.push_back((from.ip(), connection));
    }
}

/// The answer to a request that would change something.
pub(super) fn refusal<B>(request: &Request<B>) -> Option<Response<Full<Bytes>>> {
    if request.method() == Method::GET || request.method() == Method::HEAD {
        return None;
    }
    let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "read only\n");
    let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
    refusal.headers_mut().insert(ALLOW, allowed);
    Some(refusal)
}

async fn answer<B>(request: &Request<B>, metrics: Arc<Metrics>) -> Response<Full<Bytes>> {
    if let Some(refusal) = refusal(request) {
        return refusal;
    }
    match request.uri().path() {
        "/metrics" => metrics_page(metrics).await,
        "/healthz" => plain(StatusCode::OK, "ok\n"),
        "/readyz" => readiness(metrics).await,
        _ => plain(
            StatusCode::NOT_FOUND,
            "not found; available paths are /metrics, /healthz and /readyz\n",
        ),
    }
}

async fn metrics_page(metrics: Arc<Metrics>) -> Response<Full<Bytes>> {
    let looking = metrics.clone();
    let look = tokio::task::spawn_blocking(move || looking.refresh());
    // A timeout is not an error: the old values are returned with their age.
    let _ = tokio::time::timeout(REFRESH_TIMEOUT, look).await;
    match metrics.render() {
        Ok(text) => respond(StatusCode::OK, OPEN_METRICS, text),
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
    }
}

async fn readiness(metrics: Arc<Metrics>) -> Response<Full<Bytes>> {
    let router = metrics.router().view();
    let reasons = match metrics.driver() {
        Some(driver) if metrics.readiness().get() => {
            let driver = driver.clone();
            let probe = tokio::task::spawn_blocking(move || driver.pools.missing());
            match tokio::time::timeout(REFRESH_TIMEOUT, probe).await {
                Ok(Ok(missing)) => missing,
                Ok(Err(_)) => vec!["the check of this host failed".to_string()],
                Err(_) => vec!["the check of this host timed out".to_string()],
            }
        }
        None if metrics.readiness().get() && router.is_some() => {
            router.map(|router| router.missing()).unwrap_or_default()
        }
        None if let Some(problem) = metrics.populations().problem() => {
            problem.into_iter().collect()
        }
        _ => vec!["calls are not served: the driver is starting or stopping".to_string()],
    };
    if reasons.is_empty() {
        plain(StatusCode::OK, "ready\n")
    } else {
        let text = format!("{}\n", reasons.join("\n"));
        plain(StatusCode::SERVICE_UNAVAILABLE, &text)
    }
}

pub(super) fn plain(code: StatusCode, text: &str) -> Response<Full<Bytes>> {
    respond(code, PLAIN, text.to_string())
}

pub(super) fn respond(code: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = code;
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
