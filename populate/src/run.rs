//! One attempt, from its configuration to a volume that is filled and durable. `blocks` writes one
//! object, `objects` a bucket, `image` an image of a registry.

mod blocks;
mod image;
mod objects;

use std::cell::Cell;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::config::{Config, Http, Source, Target};
use crate::failure::{Failure, Next, Result};
use crate::format::decode::decoder;
use crate::format::{Compression, Format};
use crate::net::address::Policy;
use crate::net::client::{Auth, Client, Get, RequestLimits, parse_url};
use crate::net::dial::Dialer;
use crate::net::download::Download;
use crate::report::Report;
use crate::source::received::{Meter, Received, hex, sha256};
use crate::source::s3::Signer;
use crate::target::disk::{Disk, open_folder};
use crate::target::tree::{Rules, Style, Tree, check_empty};

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

/// What the Secret has for the source.
enum Credentials {
    None,
    Auth(Auth),
    /// Of a registry, in the form of Docker's configuration.
    Registry(Vec<u8>),
}

/// An attempt, with everything that it needs opened and read.
pub struct Attempt<'a> {
    config: &'a Config,
    report: &'a Report,
    client: Rc<Client>,
    target: Opened,
    credentials: Credentials,
    /// Whether the volume has a part of the content with which no other attempt can begin.
    has_part: Cell<bool>,
}

impl<'a> Attempt<'a> {
    /// Reads Secrets and certificates, and opens the target. `policy` decides what may be dialled; it is
    /// a value, so that tests can have servers of their own.
    pub fn prepare(config: &'a Config, policy: Policy, report: &'a Report) -> Result<Attempt<'a>> {
        let seconds = Duration::from_secs(config.limits.seconds);
        let deadline = Instant::now().checked_add(seconds);
        let limits = RequestLimits {
            deadline: deadline
                .ok_or_else(|| Failure::refused("ConfigurationInvalid", "limits.seconds"))?,
            silence: Duration::from_secs(config.limits.silence_seconds),
            redirects: config.limits.redirects,
        };
        let mut bundles = Vec::new();
        if let Some(path) = &config.network.ca_bundle {
            bundles.push(read_bundle(path)?);
        }
        let inline = config.network.certificates.as_ref();
        bundles.extend(inline.map(|text| text.clone().into_bytes()));
        if let Some(secret) = &config.secret {
            bundles.extend(secret.find("ca.crt")?);
        }
        let dialer = Dialer::new(policy, config.proxy()?, &bundles)?;
        Ok(Attempt {
            config,
            report,
            client: Client::new(dialer, limits)?,
            target: Opened::new(&config.target)?,
            credentials: read_credentials(config)?,
            has_part: Cell::new(false),
        })
    }

    /// The folders that the attempt writes to.
    pub fn folders(&self) -> Vec<PathBuf> {
        let target = match &self.config.target {
            Target::Block(_) => None,
            Target::Filesystem(path) => Some(path.clone()),
        };
        target
            .into_iter()
            .chain(self.config.scratch.clone())
            .collect()
    }

    /// Fills the target.
    pub fn run(&self) -> Result<()> {
        let filled = match &self.config.source {
            Source::Http(http) => self.http(http),
            Source::Oci(oci) => self.image(oci),
            Source::S3(s3) => self.objects(s3),
        };
        filled.map_err(|failure| match self.has_part.get() {
            true => failure.with_partial_content(),
            false => failure,
        })
    }

    fn http(&self, http: &Http) -> Result<()> {
        let url = parse_url(&http.url)?;
        let auth = self.auth(&url)?;
        self.object(Get::new(url, auth), http.checksum.expected()?.as_deref())
    }

    /// What is sent to a URL of the configuration. A Secret that may not be sent there ends the
    /// attempt: without it, the server's refusal would hide the reason.
    fn auth(&self, url: &url::Url) -> Result<Auth> {
        match (&self.credentials, &self.config.secret) {
            (Credentials::Auth(auth), Some(secret)) => secret.check(url).map(|()| auth.clone()),
            _ => Ok(Auth::None),
        }
    }

    /// Receives one object into the target.
    fn object(&self, get: Get, expected: Option<&str>) -> Result<()> {
        let format = self.config.format;
        let is_raw = format.is_none_or(|format| format == Format::Raw);
        let point = self.config.resume_point()?.filter(|_| is_raw);
        let mut hash = sha256();
        if let Some(point) = &point {
            self.disk()?.hash(point.bytes, &mut hash)?;
        }
        let download = Download::open(&self.client, get, point.as_ref())?;
        if expected.is_none() && !download.has_end() {
            let what = "the server does not say how long the object is, so without a checksum a part of it would look like all of it";
            return Err(Failure::refused("TransferFailed", what));
        }
        let from = download.begins_at();
        let (total, validator) = (download.total(), download.validator().map(str::to_string));
        self.report.count(|numbers| numbers.total = total);
        let hash = if from > 0 { hash } else { sha256() };
        let meter = Meter::new(self.report, from, hash, self.most_received());
        let received = Received::new(download, &meter);
        let delivered = match from {
            0 => self.write_content(received, validator.as_deref()),
            _ => self
                .raw(received, &self.disk()?, from, validator.as_deref())
                .map(|()| None),
        };
        let image = delivered.map_err(|failure| meter.first_failure(failure))?;
        if let Some(expected) = expected {
            // A part of it was read from the volume again, which may be at fault.
            let next = if from > 0 {
                Next::NewVolume
            } else {
                Next::Nothing
            };
            check_digest(&hex(&meter.digest()), expected, next)?;
        }
        image.map_or(Ok(()), |image| self.convert(&image))
    }

    fn most_received(&self) -> u64 {
        let default = self
            .target
            .capacity()
            .saturating_mul(2)
            .saturating_add(1 << 30);
        self.config.limits.received_bytes.unwrap_or(default)
    }

    /// A tree at the root of the volume, which must be empty.
    fn tree(&self, style: Style) -> Result<Tree<'a>> {
        let Opened::Folder(folder, capacity) = &self.target else {
            let what = "the source has files, and the volume is a block device";
            return Err(Failure::refused("FormatRefused", what));
        };
        check_empty(folder, None)?;
        let root = folder.try_clone();
        let root = root.map_err(|error| Failure::target("open the volume", &error))?;
        let rules = Rules {
            style,
            preserve_owners: self.config.preserve_owners,
            entries: self.config.limits.entries,
            bytes: *capacity,
        };
        self.has_part.set(true);
        Ok(Tree::new(root, rules, self.report))
    }

    /// Decompresses content, which ends with the time of the attempt.
    fn decode<'b>(&'b self, compression: Compression, content: impl Read + 'b) -> impl Read + 'b {
        Timed {
            client: &self.client,
            inner: decoder(compression, content),
        }
    }
}

fn read_credentials(config: &Config) -> Result<Credentials> {
    let Some(secret) = &config.secret else {
        return Ok(Credentials::None);
    };
    match &config.source {
        Source::Http(_) => {
            let headers = secret.headers()?;
            Ok(match headers.is_empty() {
                true => Credentials::None,
                false => Credentials::Auth(Auth::Headers(headers)),
            })
        }
        Source::Oci(_) => Ok(match secret.find(".dockerconfigjson")? {
            Some(docker) => Credentials::Registry(docker),
            None => Credentials::None,
        }),
        Source::S3(s3) => Ok(Credentials::Auth(Auth::Signed(Signer {
            access_key: secret.get_text("accessKeyId")?,
            secret_key: secret.get_text("secretAccessKey")?,
            session_token: match secret.find("sessionToken")? {
                Some(_) => Some(secret.get_text("sessionToken")?),
                None => None,
            },
            region: s3.region.clone(),
        }))),
    }
}

fn read_bundle(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        let what = format!("read network.caBundle {}: {error}", path.display());
        Failure::again("ConfigurationInvalid", what)
    })
}

fn check_digest(found: &str, expected: &str, next: Next) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => {
            let what = format!("the content has the SHA-256 {found} instead of {expected}");
            Err(Failure::new(next, "ChecksumMismatch", what))
        }
    }
}

/// Decompression can take long without a byte from a server.
struct Timed<'a, R> {
    client: &'a Client,
    inner: R,
}

impl<R: Read> Read for Timed<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.client.check_time()?;
        self.inner.read(into)
    }
}

/// Adds one archive to a tree, and reads what follows its end.
fn add_archive(tree: &mut Tree, content: &mut (impl Read + ?Sized)) -> Result<()> {
    tree.add_all(&mut *content)?;
    drain(content)
}

fn drain(content: &mut (impl Read + ?Sized)) -> Result<()> {
    let read = io::copy(content, &mut io::sink());
    read.map(drop)
        .map_err(|error| Failure::content("the content", error))
}
