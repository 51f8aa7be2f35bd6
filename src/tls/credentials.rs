//! The credentials of handshakes: the last valid bundle, reloaded when its files change.
//!
//! A bundle is valid if it parses, its key matches its certificate, and its certificate contains
//! the name of this process. For an invalid one (half written, or of another node) one warning is
//! logged, and the last valid one stays in use.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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

/// Files are checked when a connection is made, but at most this often.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// The ALPN protocol ID of gRPC (HTTP/2).
const GRPC: &[u8] = b"h2";

/// The certificate of this process, and the trusted CAs.
#[derive(Debug)]
pub struct Credentials {
    own: Name,
    files: Option<Files>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None until the files exist.
    current: Option<Arc<Current>>,
    /// The last bundle that was read, valid or not.
    last_read: Bundle,
    looked: Instant,
}

/// A valid bundle, ready for handshakes.
pub(super) struct Current {
    /// For the listening end, which accepts the router.
    pub(super) server: Arc<ServerConfig>,
    /// For the listening end that accepts the agents of nodes.
    pub(super) server_of_agents: Arc<ServerConfig>,
    /// For the connecting end.
    pub(super) client: Arc<ClientConfig>,
    expires: Option<u64>,
    /// Why a peer would refuse the certificate now.
    distrust_reason: Option<String>,
}

impl Credentials {
    /// Loads files, and checks them again when a connection is made. `own` is the name that the
    /// certificate must contain.
    pub fn of_files(own: Name, files: Files) -> Result<Credentials, TlsError> {
        let last_read = files.read()?;
        let current = Current::new(&own, &last_read, &files.places())?;
        Ok(Credentials::with(
            own,
            Some(files),
            last_read,
            Some(current),
        ))
    }

    /// Like [`Credentials::of_files`], but the files need not exist yet: another process is about
    /// to create them, and work that needs no certificate must not wait. Until then no connection
    /// is made. Existing but invalid files are an error.
    pub fn of_files_to_come(own: Name, files: Files) -> Result<Credentials, TlsError> {
        match files.read() {
            Err(error) if error.is_missing() => {
                tracing::warn!(error = %chain(&error), "waiting for certificates; connections are refused until then");
                Ok(Credentials::with(own, Some(files), Bundle::default(), None))
            }
            Ok(_) | Err(_) => Credentials::of_files(own, files),
        }
    }

    /// From memory; [`Credentials::replace`] changes the bundle.
    pub fn of_bundle(own: Name, bundle: Bundle) -> Result<Credentials, TlsError> {
        let current = Current::new(&own, &bundle, &Places::nowhere())?;
        Ok(Credentials::with(own, None, bundle, Some(current)))
    }

    fn with(
        own: Name,
        files: Option<Files>,
        last_read: Bundle,
        current: Option<Current>,
    ) -> Credentials {
        if let Some(current) = &current {
            current.log_identity(&own);
        }
        Credentials {
            own,
            files,
            state: Mutex::new(State {
                current: current.map(Arc::new),
                last_read,
                looked: Instant::now(),
            }),
        }
    }

    /// Uses another bundle for future connections. After an error the previous one stays.
    pub fn replace(&self, bundle: Bundle) -> Result<(), TlsError> {
        let current = Current::new(&self.own, &bundle, &Places::nowhere())?;
        current.log_identity(&self.own);
        let mut state = self.state();
        state.current = Some(Arc::new(current));
        state.last_read = bundle;
        Ok(())
    }

    /// Whether a peer that trusts the same CAs would have accepted the certificate when it was
    /// read: it was issued by them and within its validity period.
    pub fn is_trusted(&self) -> bool {
        self.now()
            .is_some_and(|current| current.distrust_reason.is_none())
    }

    /// Why the certificate is not trusted now; none if it is, or if it does not exist.
    pub fn distrust_reason(&self) -> Option<String> {
        self.now()?.distrust_reason.clone()
    }

    /// When the certificate expires, in seconds since 1970. This checks the files as a handshake
    /// does, because connections live long, and none may have been made since the files changed.
    pub fn expires(&self) -> Option<u64> {
        self.now()?.expires
    }

    /// The time until then.
    pub fn time_left(&self) -> Option<Duration> {
        let until = UNIX_EPOCH + Duration::from_secs(self.expires()?);
        let left = until.duration_since(SystemTime::now());
        Some(left.unwrap_or_default())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a handshake; none until the files exist. Reads three small files at most once per
    /// [`RELOAD_INTERVAL`].
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
        // Twice, because a new generation may be written between the reads of two files.
        let mut problem = None;
        for _ in 0..2 {
            let read = match files.read() {
                Ok(read) if read == state.last_read => break,
                Ok(read) => read,
                Err(error) => {
                    problem = Some(error);
                    continue;
                }
            };
            match Current::new(&self.own, &read, &files.places()) {
                Ok(current) => {
                    current.log_identity(&self.own);
                    state.current = Some(Arc::new(current));
                    state.last_read = read;
                    return;
                }
                Err(error) => {
                    problem = Some(error);
                    state.last_read = read;
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
        let controller = Name::controller()?;
        let accepting = |audience| {
            let named = AudienceVerifier {
                controller: controller.clone(),
                audience,
                chain: verifier.clone(),
            };
            let server = server(&provider, Arc::new(named), chain.clone(), key.clone_key());
            server.map(Arc::new).map_err(wrong)
        };
        let server = accepting(Audience::Controller)?;
        let server_of_agents = accepting(Audience::Agents)?;
        let client = client(&provider, roots, chain, key);
        Ok(Current {
            server,
            server_of_agents,
            client: Arc::new(client.map_err(wrong)?),
            expires,
            distrust_reason: judged.err().map(|error| in_words(&error)),
        })
    }

    fn log_identity(&self, own: &Name) {
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
    // A resumed session would not be verified again.
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

/// The reason why a certificate is refused; a wrong clock is named as a possible cause.
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

/// Asks the verifier with a time far in the future: no certificate is valid then, and its error
/// contains the end of the validity period.
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

/// Which processes a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// The router.
    Controller,
    /// Agents of nodes, whose calls are checked for the name of the node.
    Agents,
}

/// Whether a verified certificate is the one of a node.
pub fn is_of_node(certificate: &CertificateDer<'_>, node: &str) -> bool {
    let parsed = ParsedCertificate::try_from(certificate);
    match (parsed, Name::node(node)) {
        (Ok(parsed), Ok(name)) => verify_server_name(&parsed, &name.0).is_ok(),
        _ => false,
    }
}

/// Accepts a peer whose certificate is verified and has a name of the audience.
#[derive(Debug)]
struct AudienceVerifier {
    controller: Name,
    audience: Audience,
    chain: Arc<dyn ClientCertVerifier>,
}

impl AudienceVerifier {
    /// Nothing has the name of the controller and of a node. The verifier reports the names in a
    /// certificate only if another one is expected, so for an agent the controller's is.
    fn check(&self, leaf: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let verified = verify_server_name(&ParsedCertificate::try_from(leaf)?, &self.controller.0);
        let names = match (self.audience, verified) {
            (Audience::Controller, verified) => return verified,
            (Audience::Agents, Ok(())) => Vec::new(),
            (
                Audience::Agents,
                Err(rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext {
                    presented,
                    ..
                })),
            ) => presented,
            (Audience::Agents, Err(error)) => return Err(error),
        };
        let is_node = |name: &String| {
            let name = name.strip_prefix("DnsName(\"node.");
            name.is_some_and(|name| name.ends_with(".slackwater\")"))
        };
        match names.iter().any(is_node) {
            true => Ok(()),
            false => Err(CertificateError::NotValidForName.into()),
        }
    }
}

impl ClientCertVerifier for AudienceVerifier {
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
        self.check(leaf)?;
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
