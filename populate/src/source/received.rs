//! Bytes as they arrive: counted, limited and hashed, before anything reads them.

use std::cell::RefCell;
use std::io::{self, Read};
use std::rc::Rc;

use ring::digest::{Context, SHA256};

use crate::failure::{Failure, Result};
use crate::report::Report;

/// What was received so far. Shared, because decoders own the reader.
pub struct Meter<'a> {
    report: &'a Report,
    state: RefCell<State>,
}

struct State {
    bytes: u64,
    most: u64,
    hash: Context,
    /// Why reading has failed. Decoders lose the reason on the way.
    failure: Option<Failure>,
}

impl<'a> Meter<'a> {
    /// Continues after bytes of an earlier attempt, which were hashed again.
    pub fn new(report: &'a Report, bytes: u64, hash: Context, most: u64) -> Rc<Meter<'a>> {
        report.count(|numbers| numbers.received = bytes);
        let state = State {
            bytes,
            most,
            hash,
            failure: None,
        };
        Rc::new(Meter {
            report,
            state: RefCell::new(state),
        })
    }

    /// The failure of reading, if there was one, or else that of what was read.
    pub fn first_failure(&self, other: Failure) -> Failure {
        self.state.borrow().failure.clone().unwrap_or(other)
    }

    /// How many bytes, with those of earlier attempts.
    pub fn bytes(&self) -> u64 {
        self.state.borrow().bytes
    }

    /// The SHA-256 of everything.
    pub fn digest(&self) -> Vec<u8> {
        self.state.borrow().hash.clone().finish().as_ref().to_vec()
    }
}

/// A new SHA-256.
pub fn sha256() -> Context {
    Context::new(&SHA256)
}

/// In lower case.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A reader that counts for a meter.
pub struct Received<'a, R> {
    inner: R,
    meter: Rc<Meter<'a>>,
}

impl<'a, R: Read> Received<'a, R> {
    pub fn new(inner: R, meter: &Rc<Meter<'a>>) -> Received<'a, R> {
        Received {
            inner,
            meter: meter.clone(),
        }
    }

    fn receive(&mut self, into: &mut [u8]) -> Result<usize> {
        let read = self.inner.read(into);
        let count = read.map_err(|error| match error.downcast::<Failure>() {
            Ok(failure) => failure,
            Err(error) => Failure::again("TransferFailed", format!("receive: {error}")),
        })?;
        let mut state = self.meter.state.borrow_mut();
        state.bytes += count as u64;
        if state.bytes > state.most {
            let what = format!("the source has more than the limit of {} bytes", state.most);
            return Err(Failure::refused("TooLarge", what));
        }
        state.hash.update(&into[..count]);
        let bytes = state.bytes;
        drop(state);
        self.meter.report.count(|numbers| numbers.received = bytes);
        Ok(count)
    }
}

impl<R: Read> Read for Received<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.receive(into).map_err(|failure| {
            self.meter.state.borrow_mut().failure = Some(failure.clone());
            failure.into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_and_the_reason_survive_a_decoder() {
        let report = Report::new(std::io::sink());
        let meter = Meter::new(&report, 5, sha256(), 8);
        let mut reader = Received::new(&[0_u8; 4][..], &meter);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).expect_err("it is too much");
        let other = Failure::again("Corrupt", "the decoder's view");
        assert_eq!(meter.first_failure(other).reason, "TooLarge");
    }

    #[test]
    fn the_digest_continues_that_of_an_earlier_attempt() {
        let report = Report::new(std::io::sink());
        let mut hash = sha256();
        hash.update(b"ab");
        let meter = Meter::new(&report, 2, hash, 3);
        let mut all = Vec::new();
        Received::new(&b"c"[..], &meter)
            .read_to_end(&mut all)
            .expect("it is read");
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hex(&meter.digest()), expected);
        assert_eq!(report.numbers().received, 3);
    }
}
