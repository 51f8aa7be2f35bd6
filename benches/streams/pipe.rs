//! Two programs at the ends of a TLS connection: one reads the data of a file, the other one writes it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::libc;
use slackwater::tls::Name;
use slackwater::tls::authority::{Authority, Validity};
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};

use super::Aligned;

/// What `dd bs=4M` reads and writes at a time, as an agent does.
const BLOCK: usize = 4 << 20;

#[derive(Clone, Copy, PartialEq)]
pub enum How {
    /// With O_DIRECT at both ends.
    Direct,
    /// Through the page cache, and fsync at the end.
    Buffered,
}

/// The configuration of both ends, with the cipher suites that agents use.
pub struct Ends {
    server: Arc<rustls::ServerConfig>,
    client: Arc<rustls::ClientConfig>,
    name: ServerName<'static>,
}

impl Ends {
    pub fn new() -> Ends {
        let validity = Validity::from_now(std::time::Duration::from_secs(3600));
        let authority = Authority::new(validity).unwrap();
        let bundle = authority
            .issue(&Name::node("node-0").unwrap(), validity)
            .unwrap();
        let certificate = |pem: &[u8]| CertificateDer::from_pem_slice(pem).unwrap();
        let key = PrivateKeyDer::from_pem_slice(&bundle.key).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots
            .add(certificate(authority.certificate().as_bytes()))
            .unwrap();
        let server = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate(&bundle.certificate)], key)
            .unwrap();
        let client = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ends {
            server: Arc::new(server),
            client: Arc::new(client),
            name: ServerName::try_from("node.node-0.slackwater").unwrap(),
        }
    }

    /// Copies the data of a file to another one. What is not allocated is not sent.
    pub fn copy(&self, from: &Path, to: &Path, how: How) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let connection = rustls::ServerConnection::new(self.server.clone()).unwrap();
                let (stream, _) = listener.accept().unwrap();
                let mut stream = rustls::StreamOwned::new(connection, stream);
                send(from, &mut stream, how);
                stream.conn.send_close_notify();
                stream.flush().unwrap();
            });
            let client = self.client.clone();
            let connection = rustls::ClientConnection::new(client, self.name.clone()).unwrap();
            let stream = TcpStream::connect(address).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, stream);
            let length = std::fs::metadata(from).unwrap().len();
            receive(&mut stream, to, length, how);
        });
    }
}

fn flags(how: How) -> i32 {
    match how {
        How::Direct => libc::O_DIRECT,
        How::Buffered => 0,
    }
}

fn send(from: &Path, stream: &mut impl Write, how: How) {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags(how))
        .open(from)
        .unwrap();
    let mut block = Box::new(Aligned([0; BLOCK]));
    for (start, end) in data(&file) {
        let mut at = start;
        while at < end {
            let length = BLOCK.min((end - at) as usize);
            file.read_exact_at(&mut block.0[..length], at).unwrap();
            stream.write_all(&at.to_le_bytes()).unwrap();
            stream.write_all(&(length as u64).to_le_bytes()).unwrap();
            stream.write_all(&block.0[..length]).unwrap();
            at += length as u64;
        }
    }
}

/// The ranges that are allocated.
fn data(file: &File) -> Vec<(u64, u64)> {
    use nix::unistd::{Whence, lseek};
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(start) = lseek(file, at, Whence::SeekData) {
        at = lseek(file, start, Whence::SeekHole).unwrap();
        found.push((start as u64, at as u64));
    }
    found
}

fn receive(stream: &mut impl Read, to: &Path, length: u64, how: How) {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    let file = options.custom_flags(flags(how)).open(to).unwrap();
    file.set_len(length).unwrap();
    let mut block = Box::new(Aligned([0; BLOCK]));
    let mut number = [0; 8];
    while stream.read_exact(&mut number).is_ok() {
        let at = u64::from_le_bytes(number);
        stream.read_exact(&mut number).unwrap();
        let length = u64::from_le_bytes(number) as usize;
        stream.read_exact(&mut block.0[..length]).unwrap();
        file.write_all_at(&block.0[..length], at).unwrap();
    }
    file.sync_all().unwrap();
}
