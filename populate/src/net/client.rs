//! GET requests, with redirects followed here: each one is a new connection under the same rules.

use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT_ENCODING, HOST, HeaderMap, HeaderValue, LOCATION, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::runtime::Runtime;
use url::Url;

use super::dial::Dialer;
use crate::failure::{Failure, Next, Result};
use crate::source::s3::Signer;

/// The most headers of a reply, and the most bytes of them.
const HEADERS: usize = 100;
const HEADER_BYTES: usize = 64 << 10;

/// Limits after which a request fails.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// When the whole download must have ended.
    pub deadline: Instant,
    /// The longest time without a byte.
    pub silence: Duration,
    pub redirects: usize,
}

/// A GET request.
#[derive(Clone, Debug)]
pub struct Get {
    pub url: Url,
    pub headers: HeaderMap,
    /// Sent to the origin of the URL alone, and only over https.
    pub secret: Auth,
    /// Whether a server with a public address has named this URL.
    pub from_public: bool,
}

/// The credentials of a request.
#[derive(Clone, Debug)]
pub enum Auth {
    None,
    Headers(HeaderMap),
    Signed(Signer),
}

impl Get {
    pub fn new(url: Url, secret: Auth) -> Get {
        Get {
            url,
            headers: HeaderMap::new(),
            secret,
            from_public: false,
        }
    }
}

/// A client with one thread, which works while it is waited for.
pub struct Client {
    runtime: Runtime,
    dialer: Dialer,
    limits: RequestLimits,
}

/// A reply whose status is not a redirect.
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Body,
    /// Whether this server, or one that redirected to it, has a public address.
    pub from_public: bool,
}

/// The body of a reply. Bytes are received while it is read.
pub struct Body {
    client: Rc<Client>,
    incoming: Incoming,
    rest: Bytes,
    /// Keeps the connection.
    _sender: SendRequest<Empty<Bytes>>,
}

/// Parses a URL that was configured or redirected to.
pub fn parse_url(text: &str) -> Result<Url> {
    let url = Url::parse(text);
    let url = url
        .map_err(|error| Failure::refused("UrlRefused", format!("the URL is invalid: {error}")))?;
    check_url(url)
}

fn check_url(mut url: Url) -> Result<Url> {
    let refused = |what: &str| Err(Failure::refused("UrlRefused", what));
    if !matches!(url.scheme(), "http" | "https") {
        return refused("the URL is neither http nor https");
    }
    if url.host_str().is_none_or(str::is_empty) {
        return refused("the URL has no host");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refused("the URL has a user or a password; use a Secret for them");
    }
    url.set_fragment(None);
    Ok(url)
}

impl Client {
    pub fn new(dialer: Dialer, limits: RequestLimits) -> Result<Rc<Client>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| Failure::again("Unexpected", error))?;
        Ok(Rc::new(Client {
            runtime,
            dialer,
            limits,
        }))
    }

    /// Sends a request, and follows redirects.
    pub fn get(self: &Rc<Client>, get: &Get) -> Result<Reply> {
        let mut get = get.clone();
        let mut from_public = get.from_public;
        for _ in 0..=self.limits.redirects {
            let reply = self.send(&get, &mut from_public)?;
            if !is_redirect(reply.status) {
                return Ok(reply);
            }
            let next = redirected(&get.url, &reply.headers)?;
            if next.origin() != get.url.origin() {
                get.secret = Auth::None;
            }
            get.url = next;
        }
        let what = format!(
            "the server redirects more than {} times",
            self.limits.redirects
        );
        Err(Failure::refused("RedirectRefused", what))
    }

    fn send(self: &Rc<Client>, get: &Get, from_public: &mut bool) -> Result<Reply> {
        let name = get.url.origin().ascii_serialization();
        let stream = self.wait(&name, self.dialer.connect(&get.url, from_public))?;
        let failed = |error: hyper::Error| failure(&name, &error);
        let (sender, reply) = self.wait(&name, async {
            let begun = http1::Builder::new()
                .max_headers(HEADERS)
                .max_buf_size(HEADER_BYTES)
                .handshake(TokioIo::new(stream))
                .await;
            let (mut sender, connection) = begun.map_err(failed)?;
            // Its failures are those of the request and the body, too.
            tokio::spawn(connection);
            let reply = sender.send_request(request(get)?).await.map_err(failed)?;
            Ok((sender, reply))
        })?;
        let (head, incoming) = reply.into_parts();
        let body = Body {
            client: self.clone(),
            incoming,
            rest: Bytes::new(),
            _sender: sender,
        };
        Ok(Reply {
            status: head.status,
            headers: head.headers,
            body,
            from_public: *from_public,
        })
    }

    /// Waits for a server, as long as it may be silent.
    fn wait<T>(&self, name: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.check_time()?;
        let left = self
            .limits
            .deadline
            .saturating_duration_since(Instant::now());
        let limit = left.min(self.limits.silence);
        let waited = self
            .runtime
            .block_on(async { tokio::time::timeout(limit, work).await });
        waited.unwrap_or_else(|_| {
            self.check_time()?;
            let what = format!("{name} sent nothing for {} s", limit.as_secs());
            Err(Failure::again("ServerSilent", what))
        })
    }

    /// Fails when the time of the attempt is over, which also work without a server has to end with.
    pub fn check_time(&self) -> Result<()> {
        match Instant::now() < self.limits.deadline {
            true => Ok(()),
            false => Err(Failure::again(
                "TimeLimit",
                "the time limit of the attempt is over",
            )),
        }
    }

    /// Sleeps, if that is within the time limit.
    pub fn pause(&self, pause: Duration) -> bool {
        let left = self
            .limits
            .deadline
            .saturating_duration_since(Instant::now());
        let is_possible = pause < left;
        if is_possible {
            std::thread::sleep(pause);
        }
        is_possible
    }
}

fn request(get: &Get) -> Result<Request<Empty<Bytes>>> {
    let mut request = Request::new(Empty::new());
    let target = &get.url[url::Position::BeforePath..url::Position::AfterQuery];
    let invalid = |what: &str| Failure::refused("UrlRefused", format!("the URL {what}"));
    *request.uri_mut() = target.parse().map_err(|_| invalid("has an invalid path"))?;
    let host = &get.url[url::Position::BeforeHost..url::Position::AfterPort];
    let host = HeaderValue::from_str(host).map_err(|_| invalid("has an invalid host"))?;
    let headers = request.headers_mut();
    headers.insert(HOST, host);
    // The checksum is of the bytes as they are stored.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let agent = concat!("slackwater-populate/", env!("CARGO_PKG_VERSION"));
    headers.insert(USER_AGENT, HeaderValue::from_static(agent));
    headers.extend(get.headers.clone());
    match &get.secret {
        Auth::Headers(secret) if get.url.scheme() == "https" => headers.extend(secret.clone()),
        Auth::Signed(signer) if get.url.scheme() == "https" => {
            signer.sign(&get.url, SystemTime::now(), headers)?;
        }
        _ => {}
    }
    Ok(request)
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn redirected(from: &Url, headers: &HeaderMap) -> Result<Url> {
    let refused = |what: &str| Failure::refused("RedirectRefused", what);
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| refused("a redirect has no valid Location"))?;
    let next = from.join(location);
    let next = next.map_err(|_| refused("a redirect has an invalid Location"))?;
    let next = check_url(next)?;
    match from.scheme() == "https" && next.scheme() == "http" {
        true => Err(refused("the server redirects from https to http")),
        false => Ok(next),
    }
}

/// A failure of the connection. What a proxy or a server sends may be better next time.
fn failure(name: &str, error: &hyper::Error) -> Failure {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    Failure::again("TransferFailed", format!("receive from {name}: {text}"))
}

/// The failure of a status other than the one that was expected.
pub fn status_failure(url: &Url, status: StatusCode) -> Failure {
    let next = match status.as_u16() {
        408 | 425 | 429 | 500..=599 => Next::Again,
        _ => Next::Nothing,
    };
    let name = url.origin().ascii_serialization();
    Failure::new(next, "ServerRefused", format!("{name} replied {status}"))
}

impl Body {
    /// Reads more, without ever returning an error of another kind than [`Failure`].
    pub fn receive(&mut self, into: &mut [u8]) -> Result<usize> {
        while self.rest.is_empty() {
            let client = self.client.clone();
            let frame = client.wait("the server", async {
                let frame = self.incoming.frame().await;
                frame
                    .transpose()
                    .map_err(|error| failure("the server", &error))
            })?;
            match frame.map(hyper::body::Frame::into_data) {
                None => return Ok(0),
                Some(Ok(data)) => self.rest = data,
                Some(Err(_trailers)) => {}
            }
        }
        let count = into.len().min(self.rest.len());
        into[..count].copy_from_slice(&self.rest.split_to(count));
        Ok(count)
    }

    /// All of a body of at most `most` bytes.
    pub fn read_all(mut self, most: usize) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        let mut part = [0; 16 << 10];
        loop {
            let count = self.receive(&mut part)?;
            if count == 0 {
                return Ok(all);
            }
            all.extend_from_slice(&part[..count]);
            if all.len() > most {
                let what = format!("the server's reply is longer than {most} bytes");
                return Err(Failure::refused("TooLarge", what));
            }
        }
    }
}

impl io::Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.receive(into).map_err(io::Error::from)
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        io::Error::other(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_with_users_and_other_schemes_are_refused() {
        for text in [
            "ftp://a.example/",
            "file:///etc/passwd",
            "http://user@a.example/",
            "https://user:secret@a.example/",
            "http://",
            "https://b\u{fc}cher.example/",
            "/relative",
            "",
        ] {
            let failure = parse_url(text).expect_err(text);
            assert_eq!(failure.next, Next::Nothing);
            assert!(!failure.to_string().contains("secret"));
        }
        let url = parse_url("https://a.example/b#c").expect("a URL");
        assert_eq!(url.as_str(), "https://a.example/b");
    }

    #[test]
    fn redirects_never_lead_from_https_to_http() {
        let to = |from: &str, to: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, to.parse().expect("a value"));
            let next = redirected(&Url::parse(from).expect("a URL"), &headers);
            next.map(|url| url.to_string())
                .map_err(|failure| failure.next)
        };
        let refused = Err(Next::Nothing);
        assert_eq!(to("https://a.example/", "http://a.example/"), refused);
        assert_eq!(to("https://a.example/", "ftp://a.example/"), refused);
        assert_eq!(to("http://a.example/", "file:///etc/passwd"), refused);
        assert_eq!(to("http://a.example/", "//u:p@b.example/"), refused);
        assert_eq!(
            to("http://a.example/", "https://b.example"),
            Ok("https://b.example/".into())
        );
        assert_eq!(
            to("https://a.example/b/c", "../d?e"),
            Ok("https://a.example/d?e".into())
        );
        assert_eq!(
            to("https://a.example/b", "//c.example/"),
            Ok("https://c.example/".into())
        );
    }

    #[test]
    fn a_status_is_final_unless_the_server_may_recover() {
        let url = Url::parse("https://a.example/").expect("a URL");
        let next = |code: u16| {
            let status = StatusCode::from_u16(code).expect("a status");
            status_failure(&url, status).next
        };
        for code in [408, 425, 429, 500, 502, 503, 504] {
            assert_eq!(next(code), Next::Again, "{code}");
        }
        for code in [204, 400, 401, 403, 404, 410, 416] {
            assert_eq!(next(code), Next::Nothing, "{code}");
        }
    }
}
