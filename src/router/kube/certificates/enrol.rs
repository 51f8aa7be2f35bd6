//! The certificate of a node: a program next to the driver, in a container of its own, which is the only
//! one with a token for the API server. It creates the node's key, requests the certificate, and keeps
//! three files up to date, which the driver reads.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::kube::Client;
use ::kube::api::{Api, ObjectMeta, PostParams};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::api::core::v1::ConfigMap;

use super::authorities::LEAF_VALIDITY;
use super::signer::SIGNER;
use super::{CA, TRUST};
use crate::error::{Error, Result, chain};
use crate::router::kube::ask;
use crate::tls::{Bundle, Credentials, Files, Name, TlsError, request};

/// How often the program checks whether the authorities have changed, or half of the certificate's
/// lifetime has passed.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// The delay after a failure. It doubles with each further one, up to [`CHECK_INTERVAL`], because each
/// attempt may have created an object in the cluster.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(5);
/// How long the program waits for a request at a time. The request stays, and is read again later.
const APPROVAL_TIMEOUT: Duration = Duration::from_secs(120);
/// Between two reads of a request. A router answers within 5 s.
const APPROVAL_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The files of the request that is not answered yet, and of its key.
const REQUEST: &str = "request";
const REQUEST_KEY: &str = "request.key";

/// The settings of the program.
#[derive(Clone, Debug)]
pub struct Enrolment {
    /// The node's name.
    pub node: String,
    /// The namespace of the routers.
    pub namespace: String,
    /// The folder of tls.crt, tls.key and ca.crt.
    pub folder: PathBuf,
}

impl Enrolment {
    /// Keeps the files up to date, for ever.
    pub async fn run(&self, client: &Client) {
        let mut failures = 0;
        loop {
            match self.refresh(client).await {
                Ok(()) => failures = 0,
                Err(error) => {
                    failures += 1;
                    let (error, pause) = (chain(&error), pause(failures).as_secs());
                    tracing::warn!(error, pause, "failed to renew the certificate of this node");
                }
            }
            tokio::time::sleep(pause(failures)).await;
        }
    }

    /// Brings the files up to date once. A crash in the middle leaves files that do not match: the
    /// driver continues with those that it read last, and the next run replaces them.
    pub async fn refresh(&self, client: &Client) -> Result<()> {
        let name = Name::node(&self.node).map_err(|error| refused(&error))?;
        let maps = Api::<ConfigMap>::namespaced(client.clone(), &self.namespace);
        let trusted = ask("the ConfigMap of CA certificates", maps.get_opt(TRUST)).await?;
        let trusted = trusted.and_then(|map| map.data?.remove(CA));
        let trusted = trusted.ok_or_else(|| {
            Error::unreachable(
                "the ConfigMap of CA certificates",
                format!("ConfigMap {}/{TRUST} does not exist yet", self.namespace),
            )
        })?;
        let files = self.files();
        if std::fs::read_to_string(&files.authorities).ok().as_ref() != Some(&trusted) {
            write(&files.authorities, &trusted)?;
        }
        // A certificate of an authority that is not trusted any more is useless, even if it is valid.
        let own = Credentials::of_files(name.clone(), files.clone()).ok();
        let own = own.filter(Credentials::is_trusted);
        let left = own.and_then(|own| own.time_left());
        if left.is_some_and(|left| left > LEAF_VALIDITY / 2) {
            return Ok(());
        }
        let (key, certificate) = self.ask_for(client, &name).await?;
        let bundle = Bundle {
            certificate: certificate.clone().into_bytes(),
            key: key.clone().into_bytes(),
            authorities: trusted.into_bytes(),
        };
        // Working files are replaced only after the new certificate was verified.
        let new = Credentials::of_bundle(name, bundle).map_err(|error| refused(&error))?;
        if let Some(why) = new.distrust_reason() {
            return Err(Error::unreachable(
                "the new certificate",
                format!("peers would reject it: {why}"),
            ));
        }
        write(&files.key, &key)?;
        write(&files.certificate, &certificate)?;
        self.forget()?;
        tracing::info!(
            node = self.node,
            "installed a new certificate for this node"
        );
        Ok(())
    }

    /// The files that the driver reads.
    pub fn files(&self) -> Files {
        Files {
            certificate: self.folder.join("tls.crt"),
            key: self.folder.join("tls.key"),
            authorities: self.folder.join("ca.crt"),
        }
    }

    /// The key and the name of the request that is not answered yet.
    fn pending(&self) -> Option<(String, String)> {
        let text = |path: PathBuf| std::fs::read_to_string(path).ok();
        let name = text(self.folder.join(REQUEST))?;
        let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
        let key = text(self.folder.join(REQUEST_KEY))?;
        is_name.then_some((key, name))
    }

    fn forget(&self) -> Result<()> {
        remove(&self.folder.join(REQUEST))?;
        remove(&self.folder.join(REQUEST_KEY))
    }

    /// A key and its certificate, from an earlier request or from a new one. A request that is not
    /// answered within the time stays, and is read again the next time.
    async fn ask_for(&self, client: &Client, name: &Name) -> Result<(String, String)> {
        let api = Api::<CertificateSigningRequest>::all(client.clone());
        let (key, request) = match self.pending() {
            Some(pending) => pending,
            None => {
                let (key, pem) = request::make(name).map_err(|error| refused(&error))?;
                write(&self.folder.join(REQUEST_KEY), &key)?;
                let request = self.request(&api, pem).await?;
                write(&self.folder.join(REQUEST), &request)?;
                (key, request)
            }
        };
        let unanswered = |reason: String| {
            Error::unreachable(format!("CertificateSigningRequest {request}"), reason)
        };
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < APPROVAL_TIMEOUT {
            tokio::time::sleep(APPROVAL_POLL_INTERVAL).await;
            let found = ask("a CertificateSigningRequest", api.get_opt(&request)).await?;
            let Some(found) = found else {
                self.forget()?;
                return Err(unanswered("it was deleted".into()));
            };
            match answer(found.status.unwrap_or_default()) {
                Some(Ok(certificate)) => return Ok((key, certificate)),
                Some(Err(denied)) => {
                    self.forget()?;
                    return Err(unanswered(denied));
                }
                None => {}
            }
        }
        let seconds = APPROVAL_TIMEOUT.as_secs();
        Err(unanswered(format!(
            "no router answered it within {seconds} s; it will be checked again"
        )))
    }

    /// Creates a request, and returns its name.
    async fn request(&self, api: &Api<CertificateSigningRequest>, pem: String) -> Result<String> {
        let object = CertificateSigningRequest {
            metadata: ObjectMeta {
                generate_name: Some(format!("slackwater-{}-", self.node)),
                ..ObjectMeta::default()
            },
            spec: CertificateSigningRequestSpec {
                request: ByteString(pem.into_bytes()),
                signer_name: SIGNER.into(),
                usages: Some(vec![
                    "digital signature".into(),
                    "server auth".into(),
                    "client auth".into(),
                ]),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        };
        let params = PostParams::default();
        let made = ask("a CertificateSigningRequest", api.create(&params, &object)).await?;
        Ok(made.metadata.name.unwrap_or_default())
    }
}

/// The delay after this number of failures in a row.
fn pause(failures: u32) -> Duration {
    match failures.checked_sub(1) {
        None => CHECK_INTERVAL,
        Some(further) => FIRST_RETRY_DELAY
            .saturating_mul(2u32.saturating_pow(further))
            .min(CHECK_INTERVAL),
    }
}

/// The certificate, or why there is none; `None` if the request is not answered yet.
fn answer(status: CertificateSigningRequestStatus) -> Option<Result<String, String>> {
    let mut conditions = status.conditions.into_iter().flatten();
    let denied = conditions.find(|one| one.type_ == "Denied" || one.type_ == "Failed");
    if let Some(denied) = denied {
        let problem = denied.message.unwrap_or_default();
        return Some(Err(format!("it was denied: {problem}")));
    }
    let bytes = status.certificate.filter(|bytes| !bytes.0.is_empty())?;
    Some(String::from_utf8(bytes.0).map_err(|_| "its certificate is not valid UTF-8".into()))
}

fn refused(error: &TlsError) -> Error {
    Error::Refused {
        subject: "this node's certificate".into(),
        reason: chain(error),
    }
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::Refused {
            subject: path.display().to_string(),
            reason: error.to_string(),
        }),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a file that only this user may read, because one of the files is a secret. The file appears
/// whole or not at all: the driver may start at any time, and would refuse half a certificate.
#[expect(
    clippy::disallowed_methods,
    reason = "a separate program: it has no host of pools, and nothing to simulate"
)]
fn write(path: &Path, text: &str) -> Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let write = || -> io::Result<()> {
        let mut file: File = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(text.as_bytes())?;
        drop(file);
        std::fs::rename(&new, path)
    };
    write().map_err(|error| Error::Refused {
        subject: path.display().to_string(),
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_repeated_ever_more_rarely() {
        let pauses: Vec<u64> = (1..=9).map(|n| pause(n).as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600]);
        assert_eq!(pause(u32::MAX), CHECK_INTERVAL);
        assert_eq!(pause(0), CHECK_INTERVAL, "all is well");
    }
}
