//! A certificate, its key and the trusted CAs, as PEM.

use std::fmt;
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, RootCertStore};

use super::TlsError;

/// The files of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The certificate of this process, with the intermediate certificates.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// The CAs that may have issued the peer's certificate; several during a rotation.
    pub authorities: PathBuf,
}

/// The contents of the three files.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Bundle {
    /// See [`Files::certificate`].
    pub certificate: Vec<u8>,
    /// See [`Files::key`].
    pub key: Vec<u8>,
    /// See [`Files::authorities`].
    pub authorities: Vec<u8>,
}

/// How errors name the parts of a bundle.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) authorities: String,
}

impl Files {
    /// Reads all three files. They may be of two generations if they change during the read.
    pub fn read(&self) -> Result<Bundle, TlsError> {
        Ok(Bundle {
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
            authorities: read(&self.authorities)?,
        })
    }

    pub(super) fn places(&self) -> Places {
        Places {
            certificate: self.certificate.display().to_string(),
            key: self.key.display().to_string(),
            authorities: self.authorities.display().to_string(),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read {
        path: path.to_path_buf(),
        source,
    })
}

impl Places {
    /// For a bundle that did not come from files.
    pub(super) fn nowhere() -> Places {
        Places {
            certificate: "the certificate".into(),
            key: "the key".into(),
            authorities: "the CA certificates".into(),
        }
    }
}

impl Bundle {
    pub(super) fn chain(&self, places: &Places) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        certificates(&self.certificate, &places.certificate)
    }

    pub(super) fn key(&self, places: &Places) -> Result<PrivateKeyDer<'static>, TlsError> {
        // The reason is not reported, because it might contain a part of the key.
        PrivateKeyDer::from_pem_slice(&self.key).map_err(|_| TlsError::Nothing {
            place: places.key.clone(),
            what: "private key in PEM (PKCS #8, SEC 1 or PKCS #1)",
        })
    }

    pub(super) fn roots(&self, places: &Places) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.authorities, &places.authorities)? {
            let added = roots.add(certificate);
            added.map_err(|source| rejected(&places.authorities, source))?;
        }
        Ok(roots)
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bundle").finish_non_exhaustive()
    }
}

fn certificates(pem: &[u8], place: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        // A partly valid file is refused as a whole.
        Ok(_) | Err(_) => Err(TlsError::Nothing {
            place: place.to_string(),
            what: "certificate in PEM",
        }),
    }
}

/// The certificates of authorities in a PEM text, as PEM without anything else.
pub fn authorities(pem: &str, place: &str) -> Result<String, TlsError> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let mut found = String::new();
    for section in pem.split_inclusive(END) {
        if let Some((_, body)) = section.rsplit_once(BEGIN) {
            found += &format!("{BEGIN}{body}\n");
        }
    }
    let bundle = Bundle {
        authorities: found.clone().into_bytes(),
        ..Bundle::default()
    };
    let places = Places {
        authorities: place.into(),
        ..Places::nowhere()
    };
    bundle.roots(&places).map(|_| found)
}

pub(super) fn rejected(place: &str, source: rustls::Error) -> TlsError {
    TlsError::Rejected {
        place: place.to_string(),
        source,
    }
}
