//! Connections: names are resolved here, and the address that was checked is the one that is dialled.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use url::{Host, Url};

use super::address::Policy;
use crate::failure::{Failure, Result};

/// Of one address; a name can have several.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The most addresses of a name that are tried.
const ADDRESSES: usize = 8;
/// The longest reply of a proxy to CONNECT.
const PROXY_REPLY_BYTES: usize = 8192;

/// A connection, with or without TLS.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// How connections are made.
pub struct Dialer {
    policy: Policy,
    tls: TlsConnector,
    proxy: Option<Url>,
}

impl Dialer {
    /// Trusts the certificates of the system, and those in `bundles` (PEM).
    pub fn new(policy: Policy, proxy: Option<Url>, bundles: &[Vec<u8>]) -> Result<Dialer> {
        let invalid = |error: &dyn std::fmt::Display| {
            let what = format!("read the certificates that are trusted: {error}");
            Failure::refused("ConfigurationInvalid", what)
        };
        let mut roots = RootCertStore::empty();
        // What cannot be read of the system's is not trusted, and the first connection fails.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        for bundle in bundles {
            for certificate in CertificateDer::pem_slice_iter(bundle) {
                let certificate = certificate.map_err(|error| invalid(&error))?;
                roots.add(certificate).map_err(|error| invalid(&error))?;
            }
        }
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| invalid(&error))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Dialer {
            policy,
            tls: TlsConnector::from(Arc::new(config)),
            proxy,
        })
    }

    /// Connects to the server of a URL. See [`Policy::check`] for `from_public`.
    pub async fn connect(&self, url: &Url, from_public: &mut bool) -> Result<Box<dyn Stream>> {
        let name = url.origin().ascii_serialization();
        let (host, port) = target(url)?;
        let stream = match &self.proxy {
            None => {
                let addresses = resolve(&host, port, &name).await?;
                let ips: Vec<_> = addresses.iter().map(SocketAddr::ip).collect();
                self.policy.check(&ips, from_public)?;
                dial(&addresses, &name).await?
            }
            Some(proxy) => {
                // The proxy resolves names, and its own rules apply to what they lead to.
                if let Some(address) = literal(&host) {
                    self.policy.check(&[address], from_public)?;
                }
                self.connect_by_proxy(proxy, &host, port).await?
            }
        };
        if url.scheme() != "https" {
            return Ok(Box::new(stream));
        }
        let failed = |error: &dyn std::fmt::Display| {
            Failure::again("TlsFailed", format!("begin TLS with {name}: {error}"))
        };
        let server = match literal(&host) {
            Some(address) => ServerName::IpAddress(address.into()),
            None => ServerName::try_from(host.to_string()).map_err(|error| failed(&error))?,
        };
        let stream = self.tls.connect(server, stream).await;
        Ok(Box::new(stream.map_err(|error| failed(&error))?))
    }

    /// A tunnel of the proxy. The administrator has configured its address, which may be private.
    async fn connect_by_proxy(
        &self,
        proxy: &Url,
        host: &Host<&str>,
        port: u16,
    ) -> Result<TcpStream> {
        let name = proxy.origin().ascii_serialization();
        let (own, own_port) = target(proxy)?;
        let addresses = resolve(&own, own_port, &name).await?;
        for address in &addresses {
            self.policy.check_proxy(address.ip())?;
        }
        let failed = |what: &dyn std::fmt::Display| {
            Failure::again(
                "ProxyFailed",
                format!("ask {name} for a connection: {what}"),
            )
        };
        let mut stream = dial(&addresses, &name).await?;
        let request = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n");
        let sent = stream.write_all(request.as_bytes()).await;
        sent.map_err(|error| failed(&error))?;
        let mut reply = Vec::new();
        while !reply.ends_with(b"\r\n\r\n") {
            // Byte by byte: what follows belongs to the server behind it.
            let byte = stream.read_u8().await.map_err(|error| failed(&error))?;
            reply.push(byte);
            if reply.len() > PROXY_REPLY_BYTES {
                return Err(failed(&"its reply is too long"));
            }
        }
        let is_ok = reply.starts_with(b"HTTP/1.1 200") || reply.starts_with(b"HTTP/1.0 200");
        match is_ok {
            true => Ok(stream),
            false => {
                let line = reply
                    .split(|byte| *byte == b'\r')
                    .next()
                    .unwrap_or_default();
                Err(failed(&format!(
                    "it replied {:?}",
                    String::from_utf8_lossy(line)
                )))
            }
        }
    }
}

fn target(url: &Url) -> Result<(Host<&str>, u16)> {
    let parts = url.host().zip(url.port_or_known_default());
    parts.ok_or_else(|| Failure::refused("UrlRefused", "the URL has no host"))
}

fn literal(host: &Host<&str>) -> Option<IpAddr> {
    match host {
        Host::Domain(_) => None,
        Host::Ipv4(address) => Some((*address).into()),
        Host::Ipv6(address) => Some((*address).into()),
    }
}

async fn resolve(host: &Host<&str>, port: u16, name: &str) -> Result<Vec<SocketAddr>> {
    let Host::Domain(domain) = host else {
        return Ok(literal(host)
            .map(|address| SocketAddr::new(address, port))
            .into_iter()
            .collect());
    };
    let failed = |what: &dyn std::fmt::Display| {
        Failure::again(
            "ResolveFailed",
            format!("find the addresses of {name}: {what}"),
        )
    };
    let found = tokio::net::lookup_host((*domain, port)).await;
    let found: Vec<_> = found
        .map_err(|error| failed(&error))?
        .take(ADDRESSES)
        .collect();
    match found.is_empty() {
        true => Err(failed(&"it has none")),
        false => Ok(found),
    }
}

async fn dial(addresses: &[SocketAddr], name: &str) -> Result<TcpStream> {
    let mut last = String::new();
    for address in addresses {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Small requests are not held back.
                drop(stream.set_nodelay(true));
                return Ok(stream);
            }
            Ok(Err(error)) => last = format!("{address}: {error}"),
            Err(_) => last = format!("{address}: no answer in {} s", CONNECT_TIMEOUT.as_secs()),
        }
    }
    Err(Failure::again(
        "ConnectFailed",
        format!("connect to {name}: {last}"),
    ))
}
