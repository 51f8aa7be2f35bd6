//! One object as a stream of bytes that outlives its connections.
//!
//! A connection that breaks is followed by a request for the rest, if the server has named the
//! object by a strong ETag. Two versions of an object are never mixed.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::header::{
    CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderValue, IF_RANGE, RANGE, TRANSFER_ENCODING,
};

use super::client::{Body, Client, Get, Reply, status_failure};
use crate::failure::{Failure, Next, Result};

/// Connections in a row that break without a byte.
const BREAKS: u32 = 5;
/// The pause before the first of them; it doubles.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest ETag that is kept.
const VALIDATOR_BYTES: usize = 128;

/// A point from which a download may continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point {
    /// How many bytes are there already.
    pub bytes: u64,
    /// The strong ETag of the object that they are of.
    pub validator: String,
}

/// An object that is being received.
pub struct Download {
    client: Rc<Client>,
    get: Get,
    body: Body,
    at: u64,
    begins_at: u64,
    total: Option<u64>,
    validator: Option<String>,
    has_end: bool,
    breaks: u32,
}

impl Download {
    /// Asks for an object, or for its rest. If the server cannot send the rest, or the object has
    /// changed, the download begins at 0.
    pub fn open(client: &Rc<Client>, get: Get, from: Option<&Point>) -> Result<Download> {
        let from = from.filter(|point| point.bytes > 0);
        let mut reply = client.get(&ranged(&get, from)?)?;
        if reply.status == StatusCode::RANGE_NOT_SATISFIABLE && from.is_some() {
            reply = client.get(&get)?;
        }
        let (begins_at, total) = match (reply.status, from) {
            (StatusCode::OK, _) => (0, length(&reply.headers)),
            (StatusCode::PARTIAL_CONTENT, Some(point)) => continues(&reply, point)?,
            (status, _) => return Err(status_failure(&get.url, status)),
        };
        Ok(Download {
            client: client.clone(),
            get,
            validator: strong(&reply.headers),
            has_end: length(&reply.headers).is_some() || is_chunked(&reply.headers),
            body: reply.body,
            at: begins_at,
            begins_at,
            total,
            breaks: 0,
        })
    }

    /// How many bytes of the object the caller must have already.
    pub fn begins_at(&self) -> u64 {
        self.begins_at
    }

    /// The length of the object, if the server has sent it.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Whether the reply has its length or an end mark. Otherwise it ends with the connection, also with one that
    /// breaks.
    pub fn has_end(&self) -> bool {
        self.has_end
    }

    /// The strong ETag of the object.
    pub fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
    }

    pub fn receive(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match self.body.receive(into) {
                Ok(count) => {
                    self.breaks = 0;
                    self.at += count as u64;
                    return Ok(count);
                }
                Err(failure) => self.connect_again(failure)?,
            }
        }
    }

    fn connect_again(&mut self, mut failure: Failure) -> Result<()> {
        let Some(validator) = self.validator.clone() else {
            return Err(failure);
        };
        let point = Point {
            bytes: self.at,
            validator,
        };
        while failure.next == Next::Again && failure.reason != "TimeLimit" && self.breaks < BREAKS {
            if !self.client.pause(PAUSE * 2_u32.pow(self.breaks)) {
                break;
            }
            self.breaks += 1;
            match self.rest(&point) {
                Ok(body) => {
                    self.body = body;
                    return Ok(());
                }
                Err(next) => failure = next,
            }
        }
        Err(failure)
    }

    fn rest(&self, point: &Point) -> Result<Body> {
        let from = Some(point).filter(|point| point.bytes > 0);
        let reply = self.client.get(&ranged(&self.get, from)?)?;
        let is_same = strong(&reply.headers).as_ref() == Some(&point.validator);
        match (reply.status, from) {
            (StatusCode::OK, None) if is_same => Ok(reply.body),
            (StatusCode::PARTIAL_CONTENT, Some(point)) => {
                continues(&reply, point).map(|_| reply.body)
            }
            (StatusCode::OK, _) => Err(changed()),
            (status, _) => Err(status_failure(&self.get.url, status)),
        }
    }
}

impl io::Read for Download {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.receive(into).map_err(io::Error::from)
    }
}

fn ranged(get: &Get, from: Option<&Point>) -> Result<Get> {
    let mut get = get.clone();
    if let Some(point) = from {
        let value = |text: &str| {
            let invalid = |_| Failure::refused("ConfigurationInvalid", "the validator is invalid");
            HeaderValue::from_str(text).map_err(invalid)
        };
        get.headers
            .insert(RANGE, value(&format!("bytes={}-", point.bytes))?);
        get.headers.insert(IF_RANGE, value(&point.validator)?);
    }
    Ok(get)
}

/// The beginning and the length of the object, of a reply that is the rest of it.
fn continues(reply: &Reply, point: &Point) -> Result<(u64, Option<u64>)> {
    // A server that ignores If-Range may send the rest of another object.
    if strong(&reply.headers).is_some_and(|etag| etag != point.validator) {
        return Err(changed());
    }
    match content_range(&reply.headers) {
        Some((first, total)) if first == point.bytes => Ok((first, total)),
        _ => Err(Failure::again(
            "TransferFailed",
            "the server sent another range than requested",
        )),
    }
}

fn changed() -> Failure {
    let what = "the object changed at the server while it was received";
    Failure::new(Next::NewVolume, "SourceChanged", what)
}

fn text<'a>(headers: &'a HeaderMap, name: &hyper::header::HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn length(headers: &HeaderMap) -> Option<u64> {
    text(headers, &CONTENT_LENGTH)?.parse().ok()
}

fn is_chunked(headers: &HeaderMap) -> bool {
    text(headers, &TRANSFER_ENCODING).is_some_and(|value| value.eq_ignore_ascii_case("chunked"))
}

/// A strong ETag: in quotes, without `W/`.
pub fn is_strong(etag: &str) -> bool {
    let inner = etag
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    let is_plain = |byte: u8| byte == b'!' || (b'#'..=b'~').contains(&byte);
    etag.len() <= VALIDATOR_BYTES && inner.is_some_and(|inner| inner.bytes().all(is_plain))
}

fn strong(headers: &HeaderMap) -> Option<String> {
    let etag = text(headers, &ETAG)?;
    is_strong(etag).then(|| etag.to_string())
}

/// The first byte and the total of `bytes FIRST-LAST/TOTAL`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, total) = text(headers, &CONTENT_RANGE)?
        .strip_prefix("bytes ")?
        .split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let total = match total {
        "*" => None,
        total => Some(total.parse().ok()?),
    };
    let is_valid = first <= last && total.is_none_or(|total| last.checked_add(1) == Some(total));
    is_valid.then_some((first, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_strong_and_plain_etags_are_validators() {
        for etag in ["\"a\"", "\"\"", "\"5f-60a~!#\""] {
            assert!(is_strong(etag), "{etag}");
        }
        let long = format!("\"{}\"", "a".repeat(VALIDATOR_BYTES));
        for etag in [
            "W/\"a\"", "a", "\"", "\"a\"b\"", "\"a b\"", "\"\n\"", "\"é\"", &long, "",
        ] {
            assert!(!is_strong(etag), "{etag}");
        }
    }

    #[test]
    fn a_range_must_be_whole_and_go_to_the_end() {
        let parse = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().expect("a value"));
            content_range(&headers)
        };
        assert_eq!(parse("bytes 5-9/10"), Some((5, Some(10))));
        assert_eq!(parse("bytes 5-9/*"), Some((5, None)));
        for text in [
            "bytes 5-8/10",
            "bytes 9-5/10",
            "bytes 5-9/5",
            "bytes */10",
            "bytes -1-9/10",
            "bytes 0-18446744073709551615/18446744073709551615",
            "items 5-9/10",
            "",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
