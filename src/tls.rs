//! Mutual TLS between the router and the agents, with certificates that may change at any time, and
//! names that decide which process may call which.
//!
//! An agent's certificate contains the name `node.NODE.slackwater`, the router's
//! `controller.slackwater`. An agent accepts connections from the router only, so the stolen key of
//! a node gives no access to other agents; the router checks the name of the node, so it notices if
//! another node now has the address. At the address where an agent sends snapshots, it accepts the
//! agents of nodes only, and each call is checked for the node to which the router has granted it.
//!
//! | module | content |
//! |---|---|
//! | `bundle` | a certificate, its key and the CAs, as PEM, from files or from memory |
//! | `credentials` | what handshakes use now, reloaded when the files change |
//! | `incoming`, `dial` | both ends of a connection |
//! | `authority`, `request` | issue certificates where no other issuer exists |
//!
//! Every connection makes a full TLS 1.3 handshake: sessions are not resumed, so an expired or no
//! longer trusted certificate is noticed at the next connection. Existing connections stay open.

pub mod authority;
mod bundle;
mod credentials;
mod dial;
mod incoming;
pub mod request;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::ServerName;

pub use bundle::{Bundle, Files, authorities};
pub use credentials::{Audience, Credentials, is_of_node};
pub use dial::{Connection, Connector};
pub use incoming::{Incoming, Refusals, Secured};

/// How often both ends send a ping on an idle connection.
pub const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long the answer may take. The sum of both is how long a freeze lasts after the network is
/// cut, and how long the other machine may stall before its calls fail.
pub const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the answer may take where snapshots are copied. It waits behind the data that is on its
/// way, which may take as long as the network is slow.
pub const COPY_PING_TIMEOUT: Duration = Duration::from_secs(60);
/// A name in a certificate, which identifies a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(ServerName<'static>);

impl Name {
    /// The name of the router.
    pub fn controller() -> Result<Name, TlsError> {
        Name::of("controller.slackwater".into())
    }

    /// The name of a node: `node.NODE.slackwater`.
    pub fn node(node: &str) -> Result<Name, TlsError> {
        Name::of(format!("node.{node}.slackwater"))
    }

    fn of(name: String) -> Result<Name, TlsError> {
        match ServerName::try_from(name.clone()) {
            Ok(parsed @ ServerName::DnsName(_)) => Ok(Name(parsed)),
            Ok(_) | Err(_) => Err(TlsError::BadName(name)),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_str())
    }
}

impl TlsError {
    /// Whether the error is that a file does not exist.
    fn is_missing(&self) -> bool {
        matches!(self, TlsError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }
}

/// Why certificates cannot be used or issued. No error contains any part of a key.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The input does not contain a required item.
    #[error("{place} contains no {what}")]
    Nothing {
        /// The file, or a description of the input.
        place: String,
        /// The missing item.
        what: &'static str,
    },
    /// The item exists but is invalid.
    #[error("{place}")]
    Rejected {
        /// The file, or a description of the input.
        place: String,
        /// The cause.
        #[source]
        source: rustls::Error,
    },
    /// The certificate has another name.
    #[error("the certificate in {place} is not valid for {name}: create one with this DNS name")]
    OfAnother {
        /// The file, or a description of the input.
        place: String,
        /// The name of this process.
        name: Name,
    },
    /// A text that cannot be a name in a certificate.
    #[error(
        "{0:?} cannot be used as a name in a certificate: at most 253 characters, and 63 between two dots"
    )]
    BadName(String),
    /// A certificate request that must not be signed.
    #[error("sign a certificate for {name}: the request was rejected, {problem}")]
    Request {
        /// The name of its sender.
        name: Name,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A certificate could not be created.
    #[error("create a certificate for {name}")]
    Make {
        name: String,
        /// The cause.
        #[source]
        source: rcgen::Error,
    },
}
