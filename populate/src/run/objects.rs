//! Objects of a bucket: one as any other object, or all with a prefix as files.

use std::time::{SystemTime, UNIX_EPOCH};

use hyper::StatusCode;
use hyper::header::{HeaderValue, IF_MATCH};

use super::Attempt;
use crate::config::S3;
use crate::failure::{Failure, Next, Result};
use crate::format::archive::{Entry, Kind};
use crate::format::name::Name;
use crate::net::client::{Auth, Get, parse_url, status_failure};
use crate::net::download::is_strong;
use crate::source::received::{Meter, Received, sha256};
use crate::source::s3::{Object, PAGE_BYTES, Page, list_url, object_url};
use crate::target::tree::{Style, Tree};

impl Attempt<'_> {
    /// Receives objects into the target.
    pub(super) fn objects(&self, s3: &S3) -> Result<()> {
        let endpoint = parse_url(&s3.endpoint)?;
        let auth = self.auth(&endpoint)?;
        match (&s3.key, &s3.prefix) {
            (Some(key), None) => {
                let url = object_url(&endpoint, &s3.bucket, key)?;
                self.object(Get::new(url, auth), s3.checksum.expected()?.as_deref())
            }
            (None, Some(prefix)) => self.all_objects(s3, &endpoint, prefix, &auth),
            _ => Err(Failure::refused(
                "ConfigurationInvalid",
                "source.s3 has either key or prefix",
            )),
        }
    }

    fn all_objects(&self, s3: &S3, endpoint: &url::Url, prefix: &str, auth: &Auth) -> Result<()> {
        let mut tree = self.tree(Style::Archive)?;
        let mut after = None;
        loop {
            let url = list_url(endpoint, &s3.bucket, prefix, after.as_deref())?;
            let reply = self.client.get(&Get::new(url.clone(), auth.clone()))?;
            if reply.status != StatusCode::OK {
                return Err(status_failure(&url, reply.status));
            }
            let page = Page::parse(&reply.body.read_all(PAGE_BYTES)?)?;
            for object in &page.objects {
                let url = object_url(endpoint, &s3.bucket, &object.key);
                self.one_object(&mut tree, prefix, object, || {
                    Ok(Get::new(url?, auth.clone()))
                })?;
            }
            // A page without objects that leads to itself would never end.
            after = page.next().map(str::to_string);
            match (&after, page.objects.is_empty()) {
                (None, _) => return tree.finish(),
                (Some(_), false) => {}
                (Some(_), true) => {
                    let what = "the list of objects has an empty page that is not its last";
                    return Err(Failure::again("TransferFailed", what));
                }
            }
        }
    }

    fn one_object(
        &self,
        tree: &mut Tree,
        prefix: &str,
        object: &Object,
        get: impl FnOnce() -> Result<Get>,
    ) -> Result<()> {
        let wrong =
            |what: &str| Failure::again("TransferFailed", format!("{what}: {:?}", object.key));
        let rest = object.key.strip_prefix(prefix);
        let rest = rest.ok_or_else(|| wrong("the list has an object without the prefix"))?;
        let rest = rest.strip_prefix('/').unwrap_or(rest);
        if rest.is_empty() && object.size == 0 {
            return Ok(());
        }
        let name = Name::parse(rest.as_bytes())?;
        // Consoles show folders by empty objects of such names.
        if rest.ends_with('/') && object.size == 0 {
            return tree.add(entry(name, Kind::Folder, 0o755, 0), &mut |_| Ok(0));
        }
        if rest.ends_with('/') || !is_strong(&object.etag) {
            let what = format!(
                "the object {:?} has a key that is no valid file name, or a weak ETag",
                object.key
            );
            return Err(Failure::refused("ArchiveRefused", what));
        }
        let mut get = get()?;
        let etag = HeaderValue::from_str(&object.etag)
            .map_err(|_| wrong("the list has an invalid ETag"))?;
        get.headers.insert(IF_MATCH, etag);
        let reply = self.client.get(&get)?;
        match reply.status {
            StatusCode::OK => {}
            StatusCode::PRECONDITION_FAILED | StatusCode::NOT_FOUND => {
                let what = format!(
                    "the object {:?} changed while the others were received",
                    object.key
                );
                return Err(Failure::new(Next::NewVolume, "SourceChanged", what));
            }
            status => return Err(status_failure(&get.url, status)),
        }
        let before = self.report.numbers().received;
        let most = before.saturating_add(object.size).min(self.most_received());
        let meter = Meter::new(self.report, before, sha256(), most);
        let mut received = Received::new(reply.body, &meter);
        let file = entry(name, Kind::File, 0o644, object.size);
        let added = tree.add(file, &mut |into| {
            let read = std::io::Read::read(&mut received, into);
            read.map_err(|error| Failure::content("an object", error))
        });
        added.map_err(|failure| meter.first_failure(failure))?;
        match meter.bytes() - before == object.size {
            true => Ok(()),
            false => Err(wrong("an object has another length than in the list")),
        }
    }
}

fn entry(name: Option<Name>, kind: Kind, mode: u32, size: u64) -> Entry {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Entry {
        name,
        kind,
        mode,
        owner: (0, 0),
        modified: (now.as_secs() as i64, now.subsec_nanos().into()),
        size,
    }
}
