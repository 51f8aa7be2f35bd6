//! The node's end: a program beside the driver, in a container of its own, which alone has a
//! token for the API server. It makes the node's key, asks for the certificate, and keeps three
//! files up to date that the driver reads.

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
use k8s_openapi::jiff::Timestamp;

use super::authorities::LEAF;
use super::signer::SIGNER;
use super::{CA, TRUST};
use crate::error::{Error, Result, chain};
use crate::router::kube::ask;
use crate::tls::{Bundle, Credentials, Files, Name, TlsError, request};

/// How often it's looked whether the authorities have changed, or the certificate is half over.
const EVERY: Duration = Duration::from_secs(600);
/// After a failure.
const SOON: Duration = Duration::from_secs(5);
/// A request that isn't answered for so long is made anew.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at a request: a router looks every 5 s.
const LOOK: Duration = Duration::from_secs(2);

/// Who enrols, and where to.
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
        loop {
            let pause = match self.look(client).await {
                Ok(()) => EVERY,
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, "this node's certificate can't be looked after");
                    SOON
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Brings the files up to date once. A crash in the middle leaves files that don't go
    /// together: the driver goes on with what it read last, and the next look makes new ones.
    pub async fn look(&self, client: &Client) -> Result<()> {
        let name = Name::node(&self.node).map_err(|error| refused(&error))?;
        let maps = Api::<ConfigMap>::namespaced(client.clone(), &self.namespace);
        let trusted = ask("the list of authorities", maps.get_opt(TRUST)).await?;
        let trusted = trusted.and_then(|map| map.data?.remove(CA));
        let trusted = trusted.ok_or_else(|| Error::Unreachable {
            what: "the list of authorities".into(),
            reason: format!("there is no ConfigMap {}/{TRUST} yet", self.namespace),
        })?;
        let files = self.files();
        if std::fs::read_to_string(&files.authorities).ok().as_ref() != Some(&trusted) {
            write(&files.authorities, &trusted)?;
        }
        // One of an authority that is gone is good for nothing, however long it's valid.
        let own = Credentials::of_files(name.clone(), files.clone()).ok();
        let own = own.filter(Credentials::is_trusted);
        let left = own.and_then(|own| own.expires()).map(|expires| {
            let now = u64::try_from(Timestamp::now().as_second()).unwrap_or(0);
            Duration::from_secs(expires.saturating_sub(now))
        });
        if left.is_some_and(|left| left > LEAF / 2) {
            return Ok(());
        }
        let (key, pem) = request::make(&name).map_err(|error| refused(&error))?;
        let certificate = self.ask_for(client, pem).await?;
        let bundle = Bundle {
            certificate: certificate.clone().into_bytes(),
            key: key.clone().into_bytes(),
            authorities: trusted.into_bytes(),
        };
        // Nothing is written over what works before this has been seen to work.
        let new = Credentials::of_bundle(name, bundle).map_err(|error| refused(&error))?;
        if !new.is_trusted() {
            return Err(Error::Unreachable {
                what: "the list of authorities".into(),
                reason: "who has signed isn't in it yet".into(),
            });
        }
        write(&files.key, &key)?;
        write(&files.certificate, &certificate)?;
        tracing::info!(node = self.node, "this node has a new certificate");
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

    async fn ask_for(&self, client: &Client, pem: String) -> Result<String> {
        let api = Api::<CertificateSigningRequest>::all(client.clone());
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
        let what = "a CertificateSigningRequest";
        let params = PostParams::default();
        let made = ask(what, api.create(&params, &object)).await?;
        let name = made.metadata.name.unwrap_or_default();
        let unanswered = |reason: String| Error::Unreachable {
            what: format!("CertificateSigningRequest {name}"),
            reason,
        };
        let begun = tokio::time::Instant::now();
        while begun.elapsed() < PATIENCE {
            tokio::time::sleep(LOOK).await;
            let found = ask(what, api.get_opt(&name)).await?;
            let Some(found) = found else {
                return Err(unanswered("it's gone".into()));
            };
            if let Some(answer) = answer(found.status.unwrap_or_default()) {
                return answer.map_err(unanswered);
            }
        }
        let seconds = PATIENCE.as_secs();
        Err(unanswered(format!(
            "no router has answered it within {seconds} s"
        )))
    }
}

/// A certificate, or why there will be none; nothing yet.
fn answer(status: CertificateSigningRequestStatus) -> Option<Result<String, String>> {
    let mut conditions = status.conditions.into_iter().flatten();
    let denied = conditions.find(|one| one.type_ == "Denied" || one.type_ == "Failed");
    if let Some(denied) = denied {
        let problem = denied.message.unwrap_or_default();
        return Some(Err(format!("it's denied: {problem}")));
    }
    let bytes = status.certificate.filter(|bytes| !bytes.0.is_empty())?;
    Some(String::from_utf8(bytes.0).map_err(|_| "its certificate is no text".into()))
}

fn refused(error: &TlsError) -> Error {
    Error::Refused {
        subject: "this node's certificate".into(),
        reason: chain(error),
    }
}

/// For us alone: one of them is a secret. Whole or not at all: the driver starts at any time, and
/// would refuse half a certificate.
#[expect(
    clippy::disallowed_methods,
    reason = "a program of its own beside the driver: no host of pools, and nothing to simulate"
)]
fn write(path: &Path, text: &str) -> Result<()> {
    let new = path.with_extension("new");
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
