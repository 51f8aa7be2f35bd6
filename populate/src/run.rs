//! One attempt, from its configuration to a volume that is filled and durable.

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hyper::header::HeaderMap;

use crate::archive::Archive;
use crate::config::{Config, Http, Source, Target};
use crate::decode::decoder;
use crate::disk::{Disk, open_folder};
use crate::failure::{Failure, Next, Result};
use crate::format::{Compression, Format, HEAD_BYTES};
use crate::net::address::Policy;
use crate::net::client::{Client, Get, Patience, parse_url};
use crate::net::dial::Dialer;
use crate::net::download::Download;
use crate::received::{Meter, Received, hex, sha256};
use crate::report::Report;
use crate::tree::{Rules, Style, Tree, check_empty};

/// What is written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The target, opened before anything is received.
enum Opened {
    Device(Disk),
    Folder(OwnedFd, u64),
}

impl Opened {
    fn new(target: &Target) -> Result<Opened> {
        match target {
            Target::Block(path) => Disk::device(path).map(Opened::Device),
            Target::Filesystem(path) => {
                open_folder(path).map(|(folder, capacity)| Opened::Folder(folder, capacity))
            }
        }
    }

    fn capacity(&self) -> u64 {
        match self {
            Opened::Device(disk) => disk.capacity(),
            Opened::Folder(_, capacity) => *capacity,
        }
    }
}

/// An attempt and what it needs.
struct Attempt<'a> {
    config: &'a Config,
    report: &'a Report,
    client: Rc<Client>,
    target: Opened,
    /// Whether the volume has a part of the content with which no other attempt can begin.
    has_part: Cell<bool>,
}

/// Fills the target of a configuration. `policy` says what may be dialled; it is a value, so that
/// tests can have servers of their own.
pub fn run(config: &Config, policy: Policy, report: &Report) -> Result<()> {
    let now = Instant::now();
    let seconds = Duration::from_secs(config.limits.seconds);
    let deadline = now.checked_add(seconds);
    let patience = Patience {
        deadline: deadline
            .ok_or_else(|| Failure::refused("ConfigurationInvalid", "limits.seconds"))?,
        silence: Duration::from_secs(config.limits.silence_seconds),
        redirects: config.limits.redirects,
    };
    let mut bundles = Vec::new();
    if let Some(path) = &config.network.ca_bundle {
        bundles.push(read_bundle(path)?);
    }
    if let Some(secret) = &config.secret {
        bundles.extend(secret.find("ca.crt")?);
    }
    let dialer = Dialer::new(policy, config.proxy()?, &bundles)?;
    let attempt = Attempt {
        config,
        report,
        client: Client::new(dialer, patience)?,
        target: Opened::new(&config.target)?,
        has_part: Cell::new(false),
    };
    match &config.source {
        Source::Http(http) => attempt.http(http),
    }
}

fn read_bundle(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        let what = format!("read network.caBundle {}: {error}", path.display());
        Failure::again("ConfigurationInvalid", what)
    })
}

impl Attempt<'_> {
    fn http(&self, http: &Http) -> Result<()> {
        let url = parse_url(&http.url)?;
        let mut secret = HeaderMap::new();
        if let Some(own) = &self.config.secret {
            secret = own.headers()?;
            if !secret.is_empty() {
                own.check(&url)?;
            }
        }
        let get = Get {
            url,
            headers: HeaderMap::new(),
            secret,
        };
        self.object(get, http.checksum.get()?.as_deref())
    }

    /// Receives one object into the target.
    fn object(&self, get: Get, expected: Option<&str>) -> Result<()> {
        let is_raw = self
            .config
            .format
            .is_none_or(|format| format == Format::Raw);
        let point = self.config.point()?.filter(|_| is_raw);
        let mut hash = sha256();
        if let Some(point) = &point {
            self.disk()?.hash(point.bytes, &mut hash)?;
        }
        let download = Download::open(&self.client, get, point.as_ref())?;
        let from = download.begins_at();
        let (total, validator) = (download.total(), download.validator().map(str::to_string));
        self.report.count(|numbers| numbers.total = total);
        let hash = if from > 0 { hash } else { sha256() };
        let meter = Meter::new(self.report, from, hash, self.most_received());
        let received = Received::new(download, &meter);
        let delivered = match from {
            0 => self.deliver(received, validator.as_deref()),
            _ => self.raw(received, &self.disk()?, from, validator.as_deref()),
        };
        delivered.map_err(|failure| match self.has_part.get() {
            true => meter.why(failure).after_a_part(),
            false => meter.why(failure),
        })?;
        let found = hex(&meter.digest());
        if expected.is_some_and(|expected| expected != found) {
            let what = format!(
                "the content has the SHA-256 {found} instead of {}",
                expected.unwrap_or_default()
            );
            // A part of it was read from the volume again, which may be at fault.
            let next = if from > 0 {
                Next::NewVolume
            } else {
                Next::Nothing
            };
            return Err(Failure::new(next, "ChecksumMismatch", what));
        }
        Ok(())
    }

    fn most_received(&self) -> u64 {
        let default = self
            .target
            .capacity()
            .saturating_mul(2)
            .saturating_add(1 << 30);
        self.config.limits.received_bytes.unwrap_or(default)
    }

    /// Where blocks are written: the device, or a file.
    fn disk(&self) -> Result<Disk> {
        match &self.target {
            Opened::Device(disk) => disk.try_clone(),
            Opened::Folder(folder, capacity) => {
                let name = &self.config.file_name;
                check_empty(folder, Some(name))?;
                Disk::file(folder, name, *capacity)
            }
        }
    }

    /// Finds out what the content is, and writes it. Everything is read to its end, because the
    /// checksum is of all of it.
    fn deliver(&self, inner: impl Read, validator: Option<&str>) -> Result<()> {
        let (head, inner) = peek(inner)?;
        let compression = Compression::of(&head);
        let mut content = decoder(compression, head.chain_to(inner));
        let (head, rest) = peek(&mut content)?;
        let format = self.config.format.unwrap_or_else(|| Format::of(&head.0));
        let mut content = head.chain_to(rest);
        match format {
            Format::Raw => {
                let disk = self.disk()?;
                disk.clear()?;
                let validator = validator.filter(|_| compression == Compression::None);
                self.raw(content, &disk, 0, validator)
            }
            Format::Tar => {
                self.tar(&mut content)?;
                drain(&mut content)
            }
            Format::Qcow2 => Err(Failure::refused("FormatRefused", "qcow2 is not supported")),
        }
    }

    /// Writes blocks from a position to the end. With a validator, prints how much is durable.
    fn raw(
        &self,
        mut content: impl Read,
        disk: &Disk,
        from: u64,
        validator: Option<&str>,
    ) -> Result<()> {
        if let Some(validator) = validator {
            self.report.set_validator(validator);
        }
        let mut at = from;
        let copied = self.copy(&mut content, disk, &mut at, validator.is_some());
        if let Err(failure) = copied {
            if validator.is_some() && failure.next == Next::Again && disk.sync().is_ok() {
                self.report.set_durable(at);
            }
            return Err(failure);
        }
        disk.finish(at, self.report)
    }

    fn copy(
        &self,
        content: &mut impl Read,
        disk: &Disk,
        at: &mut u64,
        is_durable: bool,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut durable = *at;
        loop {
            let (count, error) = fill(content, &mut chunk);
            disk.write(*at, &chunk[..count])?;
            *at += count as u64;
            self.report.count(|numbers| numbers.written = *at);
            if is_durable && *at - durable >= self.config.limits.durable_bytes {
                disk.sync()?;
                durable = *at;
                self.report.set_durable(durable);
            }
            match error {
                Some(error) => return Err(unreadable(error)),
                None if count == 0 => return Ok(()),
                None => {}
            }
        }
    }

    fn tar(&self, content: &mut impl Read) -> Result<()> {
        let Opened::Folder(folder, capacity) = &self.target else {
            let what = "the source is an archive of tar, and the volume a block device";
            return Err(Failure::refused("FormatRefused", what));
        };
        check_empty(folder, None)?;
        let root = folder.try_clone();
        let root = root.map_err(|error| Failure::target("open the volume", &error))?;
        let rules = Rules {
            style: Style::Archive,
            preserve_owners: self.config.preserve_owners,
            entries: self.config.limits.entries,
            bytes: *capacity,
        };
        let mut tree = Tree::new(root, rules, self.report);
        self.has_part.set(true);
        tree.add_all(&mut Archive::new(content))?;
        tree.finish()
    }
}

/// What a decoder says about its input.
fn unreadable(error: io::Error) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => failure,
        Err(error) => Failure::refused("Corrupt", format!("read the content: {error}")),
    }
}

/// Reads until the chunk is full, the content ends, or reading fails.
fn fill(content: &mut impl Read, chunk: &mut [u8]) -> (usize, Option<io::Error>) {
    let mut done = 0;
    while done < chunk.len() {
        match content.read(&mut chunk[done..]) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (done, Some(error)),
        }
    }
    (done, None)
}

/// The first bytes of a stream.
struct Head(Vec<u8>);

impl Head {
    fn chain_to<R: Read>(self, rest: R) -> impl Read + use<R> {
        io::Cursor::new(self.0).chain(rest)
    }
}

impl std::ops::Deref for Head {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

fn peek<R: Read>(mut inner: R) -> Result<(Head, R)> {
    let mut head = vec![0; HEAD_BYTES];
    let (count, error) = fill(&mut inner, &mut head);
    if let Some(error) = error {
        return Err(unreadable(error));
    }
    head.truncate(count);
    Ok((Head(head), inner))
}

fn drain(content: &mut impl Read) -> Result<()> {
    io::copy(content, &mut io::sink())
        .map(drop)
        .map_err(unreadable)
}
