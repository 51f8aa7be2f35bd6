//! Progress, as lines of JSON that contain numbers alone.
//!
//! The controller reads the last line of the pod's log, and accepts numbers only. So the validator
//! is a list of the bytes of the ETag.

use std::cell::{Cell, RefCell};
use std::io::Write;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Between two lines.
const PERIOD: Duration = Duration::from_secs(1);

/// The numbers of one line. What is not known is left out.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Numbers {
    /// Bytes of the object that were received, with those of earlier attempts.
    pub received: u64,
    /// Its length, if the server has sent it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Bytes that were written, after decompression.
    pub written: u64,
    /// Files and folders of an archive.
    pub entries: u64,
    /// Devices of an image that were left out.
    pub skipped: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    numbers: Numbers,
    /// An attempt may continue here: these bytes are on the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    durable: Option<u64>,
    /// The object that they are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    validator: Option<&'a [u8]>,
    /// Of the image that a tag led to.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<&'a [u8]>,
}

/// Where progress is counted and printed.
pub struct Report {
    numbers: Cell<Numbers>,
    durable: Cell<Option<u64>>,
    validator: RefCell<Option<String>>,
    digest: RefCell<Option<[u8; 32]>>,
    last: Cell<Instant>,
    out: RefCell<Box<dyn Write>>,
}

impl Report {
    pub fn new(out: impl Write + 'static) -> Report {
        Report {
            numbers: Cell::default(),
            durable: Cell::new(None),
            validator: RefCell::new(None),
            digest: RefCell::new(None),
            last: Cell::new(Instant::now()),
            out: RefCell::new(Box::new(out)),
        }
    }

    pub fn numbers(&self) -> Numbers {
        self.numbers.get()
    }

    /// Counts, and prints a line if the last one is old enough.
    pub fn count(&self, change: impl FnOnce(&mut Numbers)) {
        let mut numbers = self.numbers.get();
        change(&mut numbers);
        self.numbers.set(numbers);
        if self.last.get().elapsed() >= PERIOD {
            self.print();
        }
    }

    /// From here on an attempt can continue with this object.
    pub fn set_validator(&self, validator: &str) {
        *self.validator.borrow_mut() = Some(validator.to_string());
    }

    pub fn set_digest(&self, digest: [u8; 32]) {
        *self.digest.borrow_mut() = Some(digest);
        self.print();
    }

    /// These bytes of the object are on the disk.
    pub fn set_durable(&self, bytes: u64) {
        self.durable.set(Some(bytes));
        self.print();
    }

    /// Prints a line. A log that cannot be written does not stop the work.
    pub fn print(&self) {
        self.last.set(Instant::now());
        let validator = self.validator.borrow();
        let digest = self.digest.borrow();
        let line = Line {
            numbers: self.numbers.get(),
            durable: self.durable.get(),
            validator: validator.as_ref().map(String::as_bytes),
            digest: digest.as_ref().map(<[u8; 32]>::as_slice),
        };
        let mut text = serde_json::to_string(&line).unwrap_or_default();
        text.push('\n');
        let mut out = self.out.borrow_mut();
        drop(out.write_all(text.as_bytes()));
        drop(out.flush());
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Rc<RefCell<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_has_numbers_alone() {
        let out = Shared::default();
        let report = Report::new(out.clone());
        report.count(|numbers| numbers.received = 7);
        report.set_validator("\"e\"");
        report.set_durable(5);
        report.set_digest([1; 32]);
        let text = String::from_utf8(out.0.borrow().clone()).expect("text");
        let last = text.lines().last().expect("a line");
        let line: serde_json::Value = serde_json::from_str(last).expect("JSON");
        assert_eq!(line["received"], 7);
        assert_eq!(line["durable"], 5);
        assert_eq!(line["validator"], serde_json::json!([34, 101, 34]));
        assert!(line.get("total").is_none());
        let numbers = |value: &serde_json::Value| match value {
            serde_json::Value::Array(list) => list.iter().all(serde_json::Value::is_u64),
            value => value.is_u64(),
        };
        assert!(line.as_object().expect("an object").values().all(numbers));
    }
}
