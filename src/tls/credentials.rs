//! What handshakes use: the last good bundle, read again when its files change.
//!
//! A bundle is good if it parses, its key is that of its certificate, and its certificate has our
//! own name. One that isn't (half written, of another node) is warned of once, and the last good
//! one stays.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_rustls::rustls::client::{Resumption, verify_server_name};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::server::{
    NoServerSessionStorage, ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, SignatureScheme,
};

use super::bundle::{Bundle, Files, Places, rejected};
use super::{Name, TlsError};
use crate::error::chain;

/// Files are looked at when a connection is made, and no more often than this.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// What gRPC is called when the protocol is agreed on.
const GRPC: &[u8] = b"h2";

/// Our certificate, and who is trusted.
#[derive(Debug)]
pub struct Credentials {
    own: Name,
    files: Option<Files>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None while the files aren't there yet.
    current: Option<Arc<Current>>,
    /// What was read last, good or bad.
    seen: Bundle,
    looked: Instant,
}

/// One good bundle, ready for handshakes.
pub(super) struct Current {
    /// Of the end that listens.
    pub(super) server: Arc<ServerConfig>,
    /// Of the end that dials.
    pub(super) client: Arc<ClientConfig>,
    expires: Option<u64>,
    /// Why the other end won't take it now.
    distrust: Option<String>,
}

impl Credentials {
    /// From files, which are read now, and looked at again when a connection is made. `own` is the
    /// name that must stand in the certificate.
    pub fn of_files(own: Name, files: Files) -> Result<Credentials, TlsError> {
        let seen = files.read()?;
        let current = Current::new(&own, &seen, &files.places())?;
        Ok(Credentials::with(own, Some(files), seen, Some(current)))
    }

    /// The same where files may still be missing: somebody is about to make them, and what needs
    /// none of them shouldn't wait. Until they're there no connection is made. Files that are
    /// there, and wrong, are an error.
    pub fn of_files_to_come(own: Name, files: Files) -> Result<Credentials, TlsError> {
        match files.read() {
            Err(error) if error.is_missing() => {
                tracing::warn!(error = %chain(&error), "waiting for certificates; connections are refused until then");
                Ok(Credentials::with(own, Some(files), Bundle::default(), None))
            }
            Ok(_) | Err(_) => Credentials::of_files(own, files),
        }
    }

    /// From memory: what changes is told by [`Credentials::replace`].
    pub fn of_bundle(own: Name, bundle: Bundle) -> Result<Credentials, TlsError> {
        let current = Current::new(&own, &bundle, &Places::nowhere())?;
        Ok(Credentials::with(own, None, bundle, Some(current)))
    }

    fn with(
        own: Name,
        files: Option<Files>,
        seen: Bundle,
        current: Option<Current>,
    ) -> Credentials {
        if let Some(current) = &current {
            current.tell(&own);
        }
        Credentials {
            own,
            files,
            state: Mutex::new(State {
                current: current.map(Arc::new),
                seen,
                looked: Instant::now(),
            }),
        }
    }

    /// Takes another bundle for the connections to come. On an error the last one stays.
    pub fn replace(&self, bundle: Bundle) -> Result<(), TlsError> {
        let current = Current::new(&self.own, &bundle, &Places::nowhere())?;
        current.tell(&self.own);
        let mut state = self.state();
        state.current = Some(Arc::new(current));
        state.seen = bundle;
        Ok(())
    }

    /// Whether who trusts the same authorities as we do took our certificate when it was read: it's
    /// theirs, and its time had come and wasn't over.
    pub fn is_trusted(&self) -> bool {
        self.now().is_some_and(|current| current.distrust.is_none())
    }

    /// Why our certificate isn't trusted now; none if it is, or isn't there.
    pub fn distrust(&self) -> Option<String> {
        self.now()?.distrust.clone()
    }

    /// When our certificate expires, in seconds since 1970. Looks at the files as a handshake
    /// does: connections live long, and nobody may have made one since they changed.
    pub fn expires(&self) -> Option<u64> {
        self.now()?.expires
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a handshake; none while the files aren't there yet. Reads three small files at most
    /// once in [`RELOAD_INTERVAL`].
    pub(super) fn now(&self) -> Option<Arc<Current>> {
        let mut state = self.state();
        if let Some(files) = &self.files
            && state.looked.elapsed() >= RELOAD_INTERVAL
        {
            state.looked = Instant::now();
            self.reload(files, &mut state);
        }
        state.current.clone()
    }

    fn reload(&self, files: &Files, state: &mut State) {
        // Twice: between the readings of two files a new generation may have come.
        let mut problem = None;
        for _ in 0..2 {
            let read = match files.read() {
                Ok(read) if read == state.seen => break,
                Ok(read) => read,
                Err(error) => {
                    problem = Some(error);
                    continue;
                }
            };
            match Current::new(&self.own, &read, &files.places()) {
                Ok(current) => {
                    current.tell(&self.own);
                    state.current = Some(Arc::new(current));
                    state.seen = read;
                    return;
                }
                Err(error) => {
                    problem = Some(error);
                    state.seen = read;
                }
            }
        }
        let Some(error) = problem else { return };
        if state.current.is_none() {
            tracing::warn!(error = %chain(&error), "still waiting for certificates");
        } else {
            tracing::warn!(error = %chain(&error), "failed to load the new certificates, using the previous ones");
        }
    }
}

impl Current {
    fn new(own: &Name, bundle: &Bundle, places: &Places) -> Result<Current, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(bundle.roots(places)?);
        let chain = bundle.chain(places)?;
        let key = bundle.key(places)?;
        let wrong = |source| rejected(&places.certificate, source);
        let pair = CertifiedKey::from_der(chain.clone(), key.clone_key(), &provider);
        pair.map_err(|source| match source {
            rustls::Error::InconsistentKeys(_) => rejected(&places.key, source),
            source => wrong(source),
        })?;
        let [leaf, between @ ..] = chain.as_slice() else {
            return Err(wrong(rustls::Error::NoCertificatesPresented));
        };
        let parsed = ParsedCertificate::try_from(leaf).map_err(wrong)?;
        verify_server_name(&parsed, &own.0).map_err(|_| TlsError::OfAnother {
            place: places.certificate.clone(),
            name: own.clone(),
        })?;
        let verifier = verifier(roots.clone(), &provider, places)?;
        let expires = expiry(&*verifier, leaf, between);
        let judged = verifier.verify_client_cert(leaf, between, UnixTime::now());
        let controller = Arc::new(ControllerOnly {
            name: Name::controller()?,
            chain: verifier,
        });
        let server = server(&provider, controller, chain.clone(), key.clone_key());
        let client = client(&provider, roots, chain, key);
        Ok(Current {
            server: Arc::new(server.map_err(wrong)?),
            client: Arc::new(client.map_err(wrong)?),
            expires,
            distrust: judged.err().map(|error| in_words(&error)),
        })
    }

    fn tell(&self, own: &Name) {
        let now = UnixTime::now().as_secs();
        match self.expires {
            Some(expires) if expires <= now => {
                tracing::warn!(name = %own, expired = expires, "loaded an expired certificate, which peers will reject");
            }
            expires => tracing::info!(name = %own, expires, "loaded certificates"),
        }
    }
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current")
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

type Chain = Vec<CertificateDer<'static>>;
type Key = rustls::pki_types::PrivateKeyDer<'static>;

fn server(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
    chain: Chain,
    key: Key,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![GRPC.to_vec()];
    // A session that is resumed isn't verified again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client(
    provider: &Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Chain,
    key: Key,
) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = vec![GRPC.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn verifier(
    roots: Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
    places: &Places,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let builder = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
    builder.build().map_err(|error| match error {
        VerifierBuilderError::NoRootAnchors => TlsError::Nothing {
            place: places.authorities.clone(),
            what: "certificate in PEM",
        },
        error => rejected(
            &places.authorities,
            rustls::Error::General(error.to_string()),
        ),
    })
}

/// Why a certificate isn't taken; a clock that is wrong is named, since nothing else is.
fn in_words(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::NotValidYetContext {
            time,
            not_before,
        }) => format!(
            "it becomes valid in {} s: the clock of this machine is behind the clock of the signer",
            not_before.as_secs().saturating_sub(time.as_secs())
        ),
        rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => {
            format!(
                "it expired {} s ago: the clock of this machine is ahead, or the certificate was not renewed in time",
                time.as_secs().saturating_sub(not_after.as_secs())
            )
        }
        other => other.to_string(),
    }
}

/// Asked of the one who verifies: nobody is valid at the end of time.
fn expiry(
    verifier: &dyn ClientCertVerifier,
    leaf: &CertificateDer<'_>,
    between: &[CertificateDer<'_>],
) -> Option<u64> {
    let end = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
    match verifier.verify_client_cert(leaf, between, end) {
        Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext {
            not_after,
            ..
        })) => Some(not_after.as_secs()),
        _ => None,
    }
}

/// Takes who is verified and has the router's name.
#[derive(Debug)]
struct ControllerOnly {
    name: Name,
    chain: Arc<dyn ClientCertVerifier>,
}

impl ClientCertVerifier for ControllerOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chain.verify_client_cert(leaf, between, now)?;
        verify_server_name(&ParsedCertificate::try_from(leaf)?, &self.name.0)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.chain
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        self.chain
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
