//! A server that sends exactly the bytes that a test says, with or without TLS.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rcgen::{CertificateParams, Issuer, KeyPair};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A request, with its headers in lower case.
#[derive(Clone, Debug)]
pub struct Request {
    pub line: String,
    pub headers: BTreeMap<String, String>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// The beginning of `Range: bytes=N-`.
    pub fn from(&self) -> Option<usize> {
        let range = self.header("range")?.strip_prefix("bytes=")?;
        range.strip_suffix('-')?.parse().ok()
    }

    pub fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }
}

/// What a server does after a request. Then it closes the connection.
pub enum Step {
    Send(Vec<u8>),
    Wait(Duration),
    /// Reads another request, such as the one within a tunnel.
    Read,
}

pub type Steps = Vec<Step>;

/// A server on 127.0.0.1, or another address of the loopback network.
pub struct Server {
    pub address: SocketAddr,
    scheme: &'static str,
    requests: Arc<Mutex<Vec<Request>>>,
}

/// A certificate authority and a certificate of `localhost` and the addresses.
pub struct Tls {
    pub authority: String,
    /// Certificate and key of the server, for a program that reads them from files.
    pub own: (String, String),
    config: Arc<ServerConfig>,
}

impl Tls {
    pub fn new() -> Tls {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("valid");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).expect("a certificate").pem();
        let issuer = Issuer::new(params, key);
        let own = KeyPair::generate().expect("a key");
        let names = ["localhost", "127.0.0.1", "127.0.0.2"].map(str::to_string);
        let params = CertificateParams::new(names.to_vec()).expect("valid");
        let certificate = params.signed_by(&own, &issuer).expect("a certificate");
        let key = PrivateKeyDer::try_from(own.serialize_der()).expect("a key");
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key);
        Tls {
            authority,
            own: (certificate.pem(), own.serialize_pem()),
            config: Arc::new(config.expect("valid")),
        }
    }
}

impl Server {
    pub fn new(handle: impl Fn(&Request) -> Steps + Send + Sync + 'static) -> Server {
        Server::at("127.0.0.1", None, handle)
    }

    pub fn at(
        host: &str,
        tls: Option<&Tls>,
        handle: impl Fn(&Request) -> Steps + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind((host, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (handle, kept) = (Arc::new(handle), requests.clone());
        let config = tls.map(|tls| tls.config.clone());
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (handle, kept, config) = (handle.clone(), kept.clone(), config.clone());
                thread::spawn(move || match config {
                    None => answer(stream, &kept, &*handle),
                    Some(config) => {
                        let connection = ServerConnection::new(config).expect("valid");
                        answer(StreamOwned::new(connection, stream), &kept, &*handle);
                    }
                });
            }
        });
        Server {
            address,
            scheme: if tls.is_some() { "https" } else { "http" },
            requests,
        }
    }

    pub fn origin(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.origin())
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no panic").clone()
    }
}

/// Ends as the client's end does: a client that has seen enough closes first.
fn answer(
    stream: impl Read + Write,
    kept: &Mutex<Vec<Request>>,
    handle: &dyn Fn(&Request) -> Steps,
) {
    let mut stream = BufReader::new(stream);
    let Some(request) = read(&mut stream) else {
        return;
    };
    kept.lock().expect("no panic").push(request.clone());
    for step in handle(&request) {
        match step {
            Step::Wait(time) => thread::sleep(time),
            Step::Read => drop(read(&mut stream)),
            Step::Send(bytes) => {
                let stream = stream.get_mut();
                if stream
                    .write_all(&bytes)
                    .and_then(|()| stream.flush())
                    .is_err()
                {
                    return;
                }
            }
        }
    }
}

fn read(stream: &mut impl BufRead) -> Option<Request> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_string()),
        }
    }
    let mut lines = lines.into_iter();
    let line = lines.next()?;
    let split = |line: String| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_string()))
    };
    Some(Request {
        line,
        headers: lines.filter_map(split).collect(),
    })
}

/// A reply with its length.
pub fn reply(status: &str, headers: &[&str], body: &[u8]) -> Steps {
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    for header in headers {
        head += &format!("{header}\r\n");
    }
    head += "\r\n";
    vec![Step::Send([head.as_bytes(), body].concat())]
}

pub fn redirect(to: &str) -> Steps {
    reply("302 Found", &[&format!("Location: {to}")], b"")
}

/// A server of one object that supports ranges, as they should be.
pub fn object(request: &Request, etag: &str, content: &[u8]) -> Steps {
    let header = format!("ETag: {etag}");
    match request.from() {
        Some(from) if from >= content.len() => reply("416 Range Not Satisfiable", &[], b""),
        Some(from) if request.header("if-range") == Some(etag) => {
            let range = format!(
                "Content-Range: bytes {from}-{}/{}",
                content.len() - 1,
                content.len()
            );
            reply("206 Partial Content", &[&header, &range], &content[from..])
        }
        _ => reply("200 OK", &[&header], content),
    }
}

/// A server of one object, by plain HTTP.
pub fn serves(content: Vec<u8>) -> Server {
    Server::new(move |request| object(request, "\"1\"", &content))
}

/// A reply that breaks off after some bytes of the body.
pub fn broken(steps: Steps, body: usize) -> Steps {
    let cut = |step| match step {
        Step::Send(bytes) => {
            let head = bytes
                .windows(4)
                .position(|four| four == b"\r\n\r\n")
                .expect("a head")
                + 4;
            Step::Send(bytes[..bytes.len().min(head + body)].to_vec())
        }
        other => other,
    };
    steps.into_iter().map(cut).collect()
}

/// Whether a connection to a server is possible, which it is for as long as the test runs.
pub fn is_up(server: &Server) -> bool {
    TcpStream::connect(server.address).is_ok()
}
