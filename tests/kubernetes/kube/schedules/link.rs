//! A client of the real API server that refuses requests, that stops answering after a number of them as if
//! its router had been killed, and whose API server has another time.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use http::header::DATE;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use k8s_openapi::jiff::tz::TimeZone;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::client::Body;
use serde_json::json;

/// Sees a request before it is sent.
type Look = Box<dyn Fn(&Method, &str) + Send + Sync>;

pub struct Link {
    /// The number of requests that are still sent.
    left: AtomicI64,
    /// Methods and parts of the paths of requests that are refused.
    denied: Mutex<Vec<(Method, &'static str)>>,
    /// All requests so far.
    asked: Mutex<Vec<(Method, String)>>,
    /// How far the clock of the API server is ahead, in seconds.
    ahead: fn() -> i64,
    look: Look,
}

impl Link {
    pub fn new(ahead: fn() -> i64, look: Look) -> Arc<Link> {
        Arc::new(Link {
            left: AtomicI64::new(i64::MAX),
            denied: Mutex::default(),
            asked: Mutex::default(),
            ahead,
            look,
        })
    }

    /// A client that passes requests to another one.
    pub fn client(self: &Arc<Link>, to: Client) -> Client {
        let link = Arc::clone(self);
        let send = move |request: Request<Body>| {
            let (link, to) = (Arc::clone(&link), to.clone());
            async move { link.send(&to, request).await }
        };
        Client::new(tower::service_fn(send), "default")
    }

    /// No request is answered any more after this number of them.
    pub fn die_after(&self, requests: i64) {
        self.left.store(requests, Ordering::SeqCst);
    }

    pub fn is_dead(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }

    pub fn deny(&self, method: Method, part: &'static str) {
        self.denied.lock().unwrap().push((method, part));
    }

    pub fn allow_all(&self) {
        self.denied.lock().unwrap().clear();
    }

    /// The number of requests so far whose path ends like this.
    pub fn asked(&self, method: &Method, end: &str) -> usize {
        let asked = self.asked.lock().unwrap();
        let its = asked
            .iter()
            .filter(|(of, path)| of == method && path.ends_with(end));
        its.count()
    }

    async fn send(&self, to: &Client, request: Request<Body>) -> kube::Result<Response<Body>> {
        let (method, path) = (request.method().clone(), request.uri().path().to_string());
        if self.left.fetch_sub(1, Ordering::SeqCst) <= 0 {
            std::future::pending::<()>().await;
        }
        self.asked
            .lock()
            .unwrap()
            .push((method.clone(), path.clone()));
        let is_denied = {
            let denied = self.denied.lock().unwrap();
            let mut denied = denied.iter();
            denied.any(|(of, part)| *of == method && path.contains(part))
        };
        if is_denied {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "code": 403, "reason": "Forbidden", "message": format!("{method} is forbidden for this test")});
            let answer = Response::builder().status(StatusCode::FORBIDDEN);
            return Ok(answer
                .body(Body::from(status.to_string().into_bytes()))
                .unwrap());
        }
        (self.look)(&method, &path);
        let mut answer = to.send(request).await?;
        let ahead = (self.ahead)();
        if ahead != 0 && answer.headers().contains_key(DATE) {
            let date = HeaderValue::from_str(&date(ahead)).unwrap();
            answer.headers_mut().insert(DATE, date);
        }
        Ok(answer)
    }
}

fn date(ahead: i64) -> String {
    let now = Timestamp::now() + SignedDuration::from_secs(ahead);
    let now = now.to_zoned(TimeZone::UTC);
    now.strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}
