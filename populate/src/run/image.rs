//! An image of a registry: its layers as a tree, or one file of it as a disk.

use std::cell::{Cell, RefCell};
use std::io::{self, Read};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use url::Url;

use super::{Attempt, Credentials, add_archive, check_digest, drain};
use crate::config::Oci;
use crate::failure::{Failure, Next, Result};
use crate::format::archive::{Archive, Entry, Kind};
use crate::format::name::Name;
use crate::format::{Compression, HEAD_BYTES};
use crate::net::client::{Auth, Get, parse_url, status_failure};
use crate::net::download::Download;
use crate::source::oci::{self, Challenge, Descriptor, Digest, Manifest, Platform, Reference};
use crate::source::received::{Meter, Received, hex, sha256};
use crate::target::disk::Disk;
use crate::target::tree::Style;

/// An index leads to a manifest, and could lead to another index.
const MANIFESTS: usize = 3;
/// The largest reply of a server of tokens.
const TOKEN_BYTES: usize = 64 << 10;
/// Tokens are valid for 60 s at least, by the specification.
const TOKEN_AGE: Duration = Duration::from_secs(50);

impl Attempt<'_> {
    /// Receives an image into the target.
    pub(super) fn image(&self, config: &Oci) -> Result<()> {
        let reference = Reference::parse(&config.image)?;
        let registry = Registry::new(self, &reference)?;
        let (digest, layers) = registry.resolve(&config.platform)?;
        self.report.set_digest(digest.bytes());
        let total = layers
            .iter()
            .try_fold(0_u64, |sum, layer| sum.checked_add(layer.size));
        if total.is_none_or(|total| total > self.most_received()) {
            let what = format!(
                "the image's layers are larger than the limit of {} bytes",
                self.most_received()
            );
            return Err(Failure::refused("TooLarge", what));
        }
        match &config.path {
            Some(path) => self.disk_of_image(&registry, &layers, path),
            None => {
                self.report.count(|numbers| numbers.total = total);
                let mut tree = self.tree(Style::Image)?;
                for layer in &layers {
                    self.layer(&registry, layer, |content| add_archive(&mut tree, content))?;
                }
                tree.finish()
            }
        }
    }

    /// Receives a layer, and verifies its digest when `work` has read it to its end.
    fn layer<T>(
        &self,
        registry: &Registry,
        layer: &Descriptor,
        work: impl FnOnce(&mut dyn Read) -> Result<T>,
    ) -> Result<T> {
        let before = self.report.numbers().received;
        let download = registry.blob(&layer.digest)?;
        let meter = Meter::new(
            self.report,
            before,
            sha256(),
            before.saturating_add(layer.size),
        );
        let mut received = Received::new(download, &meter);
        let mut head = Vec::new();
        let peeked = received
            .by_ref()
            .take(HEAD_BYTES as u64)
            .read_to_end(&mut head);
        let failed = |error| meter.first_failure(Failure::content("a layer of the image", error));
        peeked.map_err(failed)?;
        let compression = Compression::of(&head);
        let mut content = self.decode(compression, io::Cursor::new(head).chain(received));
        let done = work(&mut content);
        let done = done.and_then(|done| drain(&mut content).map(|()| done));
        drop(content);
        let done = done.map_err(|failure| meter.first_failure(failure))?;
        let found = Digest::of(&hex(&meter.digest()));
        check_digest(found.as_str(), layer.digest.as_str(), Next::Nothing)?;
        Ok(done)
    }

    /// One file of an image, or the only file of a folder: the highest layer that has it decides.
    fn disk_of_image(&self, registry: &Registry, layers: &[Descriptor], path: &str) -> Result<()> {
        let name = Name::parse(path.trim_start_matches('/').as_bytes())?;
        let name = name
            .ok_or_else(|| Failure::refused("ConfigurationInvalid", "source.oci.path is empty"))?;
        for layer in layers.iter().rev() {
            // Layers below it may not be needed.
            self.report
                .count(|numbers| numbers.total = Some(numbers.received.saturating_add(layer.size)));
            let found = self.layer(registry, layer, |content| self.read_disk(&name, content))?;
            match found {
                Found::Disk(image) => return image.map_or(Ok(()), |image| self.convert(&image)),
                Found::Hidden => break,
                Found::Nothing => {}
            }
        }
        Err(Failure::refused(
            "ImageRefused",
            format!("the image has no file {name}"),
        ))
    }

    fn read_disk(&self, name: &Name, content: &mut dyn Read) -> Result<Found> {
        let mut found = Found::Nothing;
        let mut archive = Archive::new(content).of_layer(true);
        while let Some(entry) = archive.next_entry()? {
            if is_hidden_by(name, &entry) && matches!(found, Found::Nothing) {
                found = Found::Hidden;
            }
            if !is_wanted(name, &entry) {
                continue;
            }
            if entry.kind != Kind::File {
                return Err(Failure::refused(
                    "ImageRefused",
                    format!("{name} of the image is not a file"),
                ));
            }
            if matches!(found, Found::Disk(_)) {
                let what = format!("{name} of the image has more than one file");
                return Err(Failure::refused("ImageRefused", what));
            }
            found = Found::Disk(self.write_disk_content(Content(&mut archive))?);
        }
        Ok(found)
    }
}

/// What a layer has of a file.
enum Found {
    Nothing,
    /// A whiteout: lower layers do not count.
    Hidden,
    /// It was written, or is in a temporary file.
    Disk(Option<Disk>),
}

/// The file itself, or a file in the folder of that name.
fn is_wanted(wanted: &Name, entry: &Entry) -> bool {
    let Some(name) = &entry.name else {
        return false;
    };
    let is_inside = name.split().0.as_ref() == Some(wanted);
    let is_whiteout = name.split().1.starts_with(b".wh.");
    name == wanted && entry.kind != Kind::Folder
        || is_inside && !is_whiteout && entry.kind != Kind::Folder
}

/// Whether an entry is a whiteout of the file, or of a folder above it.
fn is_hidden_by(wanted: &Name, entry: &Entry) -> bool {
    let Some(name) = &entry.name else {
        return false;
    };
    let (folder, last) = name.split();
    wanted.with_folders().any(|part| {
        let (above, own) = part.split();
        above == folder && (last == b".wh..wh..opq" || last == [b".wh.", own].concat())
    })
}

/// The content of an entry.
struct Content<'a, R>(&'a mut Archive<R>);

impl<R: Read> Read for Content<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(io::Error::from)
    }
}

/// A repository of a registry, and the credentials of requests to it.
struct Registry<'a> {
    attempt: &'a Attempt<'a>,
    base: Url,
    reference: &'a Reference,
    auth: RefCell<Auth>,
    challenge: RefCell<Option<Challenge>>,
    since: Cell<Instant>,
    from_public: Cell<bool>,
}

impl<'a> Registry<'a> {
    fn new(attempt: &'a Attempt<'a>, reference: &'a Reference) -> Result<Registry<'a>> {
        let base = parse_url(&format!(
            "https://{}/v2/{}/",
            reference.registry, reference.repository
        ))?;
        Ok(Registry {
            attempt,
            base,
            reference,
            auth: RefCell::new(Auth::None),
            challenge: RefCell::new(None),
            since: Cell::new(Instant::now()),
            from_public: Cell::new(false),
        })
    }

    /// The digest that the reference leads to, and the layers of the platform.
    fn resolve(&self, platform: &Platform) -> Result<(Digest, Vec<Descriptor>)> {
        let mut version = self.reference.version.clone();
        let mut first = None;
        for _ in 0..MANIFESTS {
            let bytes = self.manifest(&version)?;
            let mut hash = sha256();
            hash.update(&bytes);
            let digest = Digest::of(&hex(hash.finish().as_ref()));
            if let Ok(expected) = Digest::try_from(version) {
                check_digest(digest.as_str(), expected.as_str(), Next::Nothing)?;
            }
            let first = first.get_or_insert(digest);
            match Manifest::parse(&bytes, platform)? {
                Manifest::Image(layers) => return Ok((first.clone(), layers)),
                Manifest::Other(digest) => version = digest.as_str().to_string(),
            }
        }
        Err(Failure::refused(
            "ImageRefused",
            "the index of the image leads to further indexes",
        ))
    }

    fn manifest(&self, version: &str) -> Result<Vec<u8>> {
        let mut get = self.get(&format!("manifests/{version}"))?;
        get.headers
            .insert(ACCEPT, HeaderValue::from_static(oci::ACCEPT));
        let mut reply = self.attempt.client.get(&get)?;
        if reply.status == StatusCode::UNAUTHORIZED && self.challenge.borrow().is_none() {
            self.from_public.set(reply.from_public);
            let challenge = reply
                .headers
                .get(WWW_AUTHENTICATE)
                .and_then(|value| value.to_str().ok());
            let challenge = challenge.and_then(Challenge::parse);
            *self.challenge.borrow_mut() = challenge;
            self.authenticate()?;
            get.secret = self.auth.borrow().clone();
            reply = self.attempt.client.get(&get)?;
        }
        match reply.status {
            StatusCode::OK => reply.body.read_all(oci::MANIFEST_BYTES),
            status => Err(status_failure(&get.url, status)),
        }
    }

    fn blob(&self, digest: &Digest) -> Result<Download> {
        if self.since.get().elapsed() > TOKEN_AGE {
            self.authenticate()?;
        }
        let get = self.get(&format!("blobs/{}", digest.as_str()))?;
        Download::open(&self.attempt.client, get, None)
    }

    fn get(&self, path: &str) -> Result<Get> {
        let url = self.base.join(&format!("./{path}"));
        let url = url.map_err(|error| Failure::refused("UrlRefused", error))?;
        Ok(Get::new(url, self.auth.borrow().clone()))
    }

    /// Answers the challenge of the registry, with the keys of the Secret if there are any.
    fn authenticate(&self) -> Result<()> {
        self.since.set(Instant::now());
        let challenge = self.challenge.borrow();
        let Some(challenge) = &*challenge else {
            return Ok(());
        };
        let auth = match challenge {
            Challenge::Basic => self.basic(&self.base)?,
            Challenge::Bearer { realm, service } => {
                let token = self.token(realm, service)?;
                header(&format!("Bearer {token}"))?
            }
        };
        *self.auth.borrow_mut() = auth;
        Ok(())
    }

    /// The keys of the registry, for a URL that may have them.
    fn basic(&self, url: &Url) -> Result<Auth> {
        let keys = match &self.attempt.credentials {
            Credentials::Registry(keys) => oci::basic_credentials(keys, &self.reference.registry),
            _ => None,
        };
        match (keys, &self.attempt.config.secret) {
            (Some(keys), Some(secret)) => {
                secret.check(url)?;
                header(&format!("Basic {keys}"))
            }
            _ => Ok(Auth::None),
        }
    }

    fn token(&self, realm: &str, service: &str) -> Result<String> {
        let mut url = parse_url(realm)?;
        if url.scheme() != "https" {
            let what = "the token server of the registry is not an https URL";
            return Err(Failure::refused("RedirectRefused", what));
        }
        let scope = format!("repository:{}:pull", self.reference.repository);
        url.query_pairs_mut()
            .append_pair("service", service)
            .append_pair("scope", &scope);
        let auth = self.basic(&url)?;
        // The registry has led here, as a redirect would.
        let get = Get {
            from_public: self.from_public.get(),
            ..Get::new(url, auth)
        };
        let reply = self.attempt.client.get(&get)?;
        if reply.status != StatusCode::OK {
            return Err(status_failure(&get.url, reply.status));
        }
        let body = reply.body.read_all(TOKEN_BYTES)?;
        let document: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let token = document["token"]
            .as_str()
            .or_else(|| document["access_token"].as_str());
        let none = || Failure::again("TransferFailed", "the token server returned no token");
        token.map(str::to_string).ok_or_else(none)
    }
}

fn header(value: &str) -> Result<Auth> {
    let invalid = |_| Failure::refused("SecretInvalid", "a token or key is not valid in a header");
    let mut value = HeaderValue::from_str(value).map_err(invalid)?;
    value.set_sensitive(true);
    Ok(Auth::Headers(HeaderMap::from_iter([(
        AUTHORIZATION,
        value,
    )])))
}
