//! The bytes of an archive between a stream of messages and an operation that blocks.

use std::io::{Error, Read, Result, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::timeout;
use tonic::Status;

use crate::agent::ExportResponse;
use crate::operation::Driver;

/// Bytes of one message.
const MESSAGE_BYTES: usize = 1 << 20;
/// How long the other side may do nothing. A tape that is changed takes longer; the command is
/// repeated then.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// How often a driver that stops is noticed.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Waits for the other side, until it is idle for too long or the driver stops.
fn wait<T>(driver: &Driver, step: impl Future<Output = T> + Unpin) -> Result<T> {
    let mut step = step;
    let mut waited = Duration::ZERO;
    while waited < IDLE_TIMEOUT {
        if driver.is_stopping() {
            return Err(Error::other("the driver stops"));
        }
        let tried = Handle::current().block_on(async { timeout(POLL_INTERVAL, &mut step).await });
        if let Ok(done) = tried {
            return Ok(done);
        }
        waited += POLL_INTERVAL;
    }
    let seconds = IDLE_TIMEOUT.as_secs();
    Err(Error::other(format!(
        "the other side did nothing for {seconds} s"
    )))
}

/// Sends what is written.
pub(super) struct Output {
    to: Sender<std::result::Result<ExportResponse, Status>>,
    driver: Arc<Driver>,
    data: Vec<u8>,
}

impl Output {
    pub(super) fn new(
        to: Sender<std::result::Result<ExportResponse, Status>>,
        driver: Arc<Driver>,
    ) -> Output {
        Output {
            to,
            driver,
            data: Vec::new(),
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let taken = bytes.len().min(MESSAGE_BYTES - self.data.len());
        self.data.extend_from_slice(&bytes[..taken]);
        if self.data.len() == MESSAGE_BYTES {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> Result<()> {
        let data = std::mem::take(&mut self.data);
        let message = Ok(ExportResponse { data });
        let sent = wait(&self.driver, Box::pin(self.to.send(message)))?;
        sent.map_err(|_| Error::other("its reader is gone"))
    }
}

/// Reads what is received.
pub(super) struct Input {
    from: Receiver<std::result::Result<Vec<u8>, String>>,
    driver: Arc<Driver>,
    data: Vec<u8>,
    at: usize,
}

impl Input {
    pub(super) fn new(
        from: Receiver<std::result::Result<Vec<u8>, String>>,
        driver: Arc<Driver>,
    ) -> Input {
        Input {
            from,
            driver,
            data: Vec::new(),
            at: 0,
        }
    }
}

impl Read for Input {
    fn read(&mut self, bytes: &mut [u8]) -> Result<usize> {
        while self.at == self.data.len() {
            let next = wait(&self.driver, Box::pin(self.from.recv()))?;
            let Some(next) = next else {
                return Ok(0);
            };
            (self.data, self.at) = (next.map_err(Error::other)?, 0);
        }
        let rest = &self.data[self.at..];
        let taken = rest.len().min(bytes.len());
        bytes[..taken].copy_from_slice(&rest[..taken]);
        self.at += taken;
        Ok(taken)
    }
}
