//! Mutual TLS between the router and the agents: certificates that may change at any time, and
//! names that decide who may ask whom.
//!
//! An agent's certificate names `node.NODE.slackwater`, the router's `controller.slackwater`. An
//! agent takes connections from the router alone, so a node's stolen key asks nobody for anything;
//! the router looks for the node's own name behind its address, so an address that has become
//! another node's is noticed.
//!
//! | room | what |
//! |---|---|
//! | `bundle` | a certificate, its key and the authorities, as PEM, from files or from memory |
//! | `credentials` | what handshakes use now, read again when the files change |
//! | `incoming`, `dial` | both ends |
//! | `authority`, `request` | make certificates where nobody else does |
//!
//! Every connection is a whole handshake of TLS 1.3: nothing is resumed, so what has expired or
//! isn't trusted any more is noticed at the next connection. Those that stand are left alone.

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

pub use bundle::{Bundle, Files};
pub use credentials::Credentials;
pub use dial::{Connection, Connector};
pub use incoming::{Incoming, Refusals, Secured};

/// How often an idle connection is asked whether its other end is there, by both ends.
pub const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long the answer may take. Together: how long after a cut of the network a freeze ends, and
/// how long a stall of the other machine may be before its calls fail.
pub const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// A name within a certificate: who somebody is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(ServerName<'static>);

impl Name {
    /// The router's.
    pub fn controller() -> Result<Name, TlsError> {
        Name::of("controller.slackwater".into())
    }

    /// A node's: `node.NODE.slackwater`.
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
    /// Whether a file isn't there.
    fn is_missing(&self) -> bool {
        matches!(self, TlsError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }
}

/// Why certificates can't be used or made. None of them tells anything of a key.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file that can't be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Something that isn't in what was given.
    #[error("{place} contains no {what}")]
    Nothing {
        /// The file, or what stands for it.
        place: String,
        /// What should be in it.
        what: &'static str,
    },
    /// What is there, and can't be taken for what it should be.
    #[error("{place}")]
    Rejected {
        /// The file, or what stands for it.
        place: String,
        /// The cause.
        #[source]
        source: rustls::Error,
    },
    /// A certificate of somebody else.
    #[error("the certificate in {place} is not valid for {name}: create one with this DNS name")]
    OfAnother {
        /// The file, or what stands for it.
        place: String,
        /// Who we are.
        name: Name,
    },
    /// A text that can't stand in a certificate as a name.
    #[error(
        "{0:?} cannot be used as a name in a certificate: at most 253 characters, and 63 between two dots"
    )]
    BadName(String),
    /// A request for a certificate that must not be signed.
    #[error("sign a certificate for {name}: the request was rejected, {problem}")]
    Request {
        /// Of whom.
        name: Name,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A certificate that couldn't be made.
    #[error("create a certificate for {name}")]
    Make {
        /// Of whom.
        name: String,
        /// The cause.
        #[source]
        source: rcgen::Error,
    },
}
