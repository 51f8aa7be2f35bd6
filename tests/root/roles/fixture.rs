//! An agent as a process, certificates, and a client with a certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slackwater::tls::authority::{Authority, Validity};
use slackwater::tls::{Bundle, Connector, Credentials, Name};
use tonic::transport::Endpoint;

use slackwater_testkit::{Client, Scratch, Server, eventually};

pub const HOUR: Duration = Duration::from_secs(3600);
/// The name that `Server` gives its node.
pub const NODE: &str = "node-1";

pub fn authority() -> Authority {
    Authority::new(Validity::from_now(HOUR)).unwrap()
}

pub fn node() -> Name {
    Name::node(NODE).unwrap()
}

pub fn controller() -> Name {
    Name::controller().unwrap()
}

pub fn issue(authority: &Authority, name: &Name) -> Bundle {
    authority.issue(name, Validity::from_now(HOUR)).unwrap()
}

/// A folder with an agent's certificate, and the flags for it.
pub struct Certificates(PathBuf);

impl Certificates {
    pub fn new(scratch: &Scratch, bundle: &Bundle) -> Certificates {
        let certificates = Certificates(scratch.dir("tls"));
        certificates.put(bundle);
        certificates
    }

    pub fn put(&self, bundle: &Bundle) {
        for (name, text) in [
            ("tls.crt", &bundle.certificate),
            ("tls.key", &bundle.key),
            ("ca.crt", &bundle.authorities),
        ] {
            std::fs::write(self.0.join(name), text).unwrap();
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn flags(&self) -> Vec<String> {
        let flag = |flag: &str, name: &str| {
            let path = self.path(name).to_str().unwrap().to_string();
            [flag.to_string(), path]
        };
        [
            flag("--tls-cert", "tls.crt"),
            flag("--tls-key", "tls.key"),
            flag("--tls-ca", "ca.crt"),
        ]
        .concat()
    }
}

/// A node of a cluster on simulated storage.
pub fn agent(scratch: &Scratch, certificates: &Certificates) -> Server {
    let server = Server::spawn(
        scratch,
        &["default=memory:"],
        &words(&flags(certificates)),
        &[],
    );
    server.wait_ready();
    server
}

/// The flags that make a driver a node of a cluster.
pub fn flags(certificates: &Certificates) -> Vec<String> {
    let mut flags = certificates.flags();
    flags.extend(["--role", "node", "--agent-listen", "127.0.0.1:0"].map(String::from));
    flags
}

pub fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// The address on which an agent listens, as it logged at its last start.
pub fn address(server: &Server) -> SocketAddr {
    let mut found = None;
    eventually("an agent that listens", || {
        found = server
            .log()
            .rsplit("listening for the controller address=")
            .next()
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        found.is_some()
    });
    found.unwrap()
}

pub fn credentials(own: Name, bundle: Bundle) -> Arc<Credentials> {
    Arc::new(Credentials::of_bundle(own, bundle).unwrap())
}

/// A client of the agent at an address, with a connection of its own.
pub fn client(credentials: &Arc<Credentials>, address: SocketAddr) -> Client {
    let connector = Connector::new(credentials.clone(), node(), address);
    let endpoint = Endpoint::from_static("http://agent");
    Client::over(endpoint.connect_with_connector_lazy(connector))
}

/// Names in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
