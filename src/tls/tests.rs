//! Tests of both ends over a real connection on this machine.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::Uri;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_stream::StreamExt;
use tower::Service;

use super::authority::{Authority, Validity};
use super::*;
use crate::error::chain;

const HOUR: Duration = Duration::from_secs(3600);
/// Only a hang reaches this limit.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);

fn authority() -> Authority {
    Authority::new(Validity::from_now(HOUR)).unwrap()
}

fn node() -> Name {
    Name::node("n1").unwrap()
}

fn controller() -> Name {
    Name::controller().unwrap()
}

fn issue(authority: &Authority, name: &Name) -> Bundle {
    authority.issue(name, Validity::from_now(HOUR)).unwrap()
}

fn credentials(own: Name, bundle: Bundle) -> Arc<Credentials> {
    Arc::new(Credentials::of_bundle(own, bundle).unwrap())
}

/// An agent that echoes each byte.
async fn agent(credentials: Arc<Credentials>) -> SocketAddr {
    listening_for(Audience::Controller, credentials).await
}

async fn listening_for(audience: Audience, credentials: Arc<Credentials>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut incoming = Incoming::new(listener, (credentials, audience), Arc::default());
    tokio::spawn(async move {
        while let Some(Ok(mut secured)) = incoming.next().await {
            tokio::spawn(async move {
                // As in HTTP/2, it sends first.
                let mut byte = [b'!'];
                secured.write_all(&byte).await.unwrap();
                while secured.read_exact(&mut byte).await.is_ok() {
                    secured.write_all(&byte).await.unwrap();
                }
            });
        }
    });
    address
}

/// A connection on which a byte was sent and returned.
async fn reached(
    credentials: &Arc<Credentials>,
    name: Name,
    address: SocketAddr,
) -> std::io::Result<Connection> {
    let mut connector = Connector::new(credentials.clone(), name, address);
    let mut connection = connector.call(Uri::from_static("http://agent")).await?;
    assert_eq!(connection.inner_mut().read_u8().await?, b'!');
    echo(&mut connection).await?;
    Ok(connection)
}

async fn echo(connection: &mut Connection) -> std::io::Result<()> {
    let secured = connection.inner_mut();
    secured.write_all(b"x").await?;
    timeout(HANG_TIMEOUT, secured.read_exact(&mut [0]))
        .await
        .unwrap()
        .map(drop)
}

fn refusal(outcome: std::io::Result<Connection>) -> String {
    outcome
        .err()
        .map_or_else(String::new, |error| chain(&error))
}

#[tokio::test]
async fn the_address_for_agents_is_reached_by_agents_alone() {
    let (own, other) = (authority(), authority());
    let source = credentials(node(), issue(&own, &node()));
    let address = listening_for(Audience::Agents, source).await;
    let n2 = Name::node("n2").unwrap();
    let reader = credentials(n2.clone(), issue(&own, &n2));
    reached(&reader, node(), address).await.unwrap();
    let mut foreign = issue(&other, &n2);
    foreign.authorities = own.certificate().into();
    let unrelated = Name::of("unrelated.example".into()).unwrap();
    let lookalike = Name::of("node.n2.slackwater.example".into()).unwrap();
    for (who, refused) in [
        (
            "router",
            credentials(controller(), issue(&own, &controller())),
        ),
        ("other authority", credentials(n2, foreign)),
        (
            "other name",
            credentials(unrelated.clone(), issue(&own, &unrelated)),
        ),
        (
            "longer name",
            credentials(lookalike.clone(), issue(&own, &lookalike)),
        ),
    ] {
        let error = refusal(reached(&refused, node(), address).await);
        assert!(!error.is_empty(), "{who}");
    }
}

#[test]
fn a_certificate_is_the_one_of_the_node_that_it_names() {
    let name = Name::node("n2").unwrap();
    let pem = issue(&authority(), &name).certificate;
    let leaf = CertificateDer::from_pem_slice(&pem).unwrap();
    assert!(is_of_node(&leaf, "n2"));
    for other in ["n1", "n2.n2", "N3", "", "*"] {
        assert!(!is_of_node(&leaf, other), "{other:?}");
    }
}

#[tokio::test]
async fn only_the_router_reaches_an_agent() {
    let (ours, other) = (authority(), authority());
    let agents = credentials(node(), issue(&ours, &node()));
    let address = agent(agents.clone()).await;
    let router = credentials(controller(), issue(&ours, &controller()));
    reached(&router, node(), address).await.unwrap();

    let elsewhere = Name::node("n2").unwrap();
    let error = refusal(reached(&router, elsewhere, address).await);
    assert!(error.contains("not valid for name \"node.n2"), "{error}");

    // A node's own certificate must not be accepted here.
    let error = refusal(reached(&agents, node(), address).await);
    assert!(error.contains("BadCertificate"), "{error}");

    let mut bundle = issue(&other, &controller());
    bundle.authorities = ours.certificate().into();
    let foreign = credentials(controller(), bundle);
    let error = refusal(reached(&foreign, node(), address).await);
    assert!(error.contains("UnknownCA"), "{error}");

    let past = Validity {
        from: SystemTime::now() - 2 * HOUR,
        until: SystemTime::now() - HOUR,
    };
    let late = credentials(controller(), ours.issue(&controller(), past).unwrap());
    let error = refusal(reached(&late, node(), address).await);
    assert!(error.contains("CertificateExpired"), "{error}");

    // An agent that the router does not trust receives nothing.
    let impostor = agent(credentials(node(), issue(&other, &node()))).await;
    let error = refusal(reached(&router, node(), impostor).await);
    assert!(error.contains("UnknownIssuer"), "{error}");

    let mut plain = TcpStream::connect(address).await.unwrap();
    plain
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let read = timeout(HANG_TIMEOUT, plain.read_to_end(&mut answer))
        .await
        .unwrap();
    assert!(
        read.is_err() || answer.first() == Some(&21),
        "an alert: {answer:?}"
    );
}

/// As cert-manager issues them for the chart: by a CA with a common name, and one certificate for
/// all nodes.
#[tokio::test]
async fn one_certificate_of_several_nodes_is_valid_for_each_of_them_and_no_other() {
    let parameters = |common: &str, names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| (*name).to_string()).collect();
        let mut parameters = CertificateParams::new(names).unwrap();
        parameters.distinguished_name = DistinguishedName::new();
        parameters
            .distinguished_name
            .push(DnType::CommonName, common);
        parameters
    };
    let mut above = parameters("slackwater-authority", &[]);
    above.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = above.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(above, key);
    let bundle = |common: &str, names: &[&str]| {
        let key = KeyPair::generate().unwrap();
        let signed = parameters(common, names).signed_by(&key, &issuer).unwrap();
        Bundle {
            certificate: signed.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
            authorities: authority.clone().into_bytes(),
        }
    };
    let nodes = ["node.n1.slackwater", "node.n2.example.org.slackwater"];
    let nodes = bundle("node.slackwater", &nodes);
    let own = bundle("controller.slackwater", &["controller.slackwater"]);
    let router = credentials(controller(), own);
    for node in ["n1", "n2.example.org"] {
        let node = Name::node(node).unwrap();
        let address = agent(credentials(node.clone(), nodes.clone())).await;
        reached(&router, node, address).await.unwrap();
    }
    let other = Name::node("n3").unwrap();
    let refused = Credentials::of_bundle(other, nodes).unwrap_err();
    assert!(matches!(refused, TlsError::OfAnother { .. }), "{refused}");
}

#[tokio::test]
async fn handshakes_that_never_end_delay_no_other_connection() {
    let ours = authority();
    let address = agent(credentials(node(), issue(&ours, &node()))).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    let router = credentials(controller(), issue(&ours, &controller()));
    let reach = reached(&router, node(), address);
    timeout(HANG_TIMEOUT, reach).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_address_that_floods_gives_up_no_handshake_of_another() {
    let ours = authority();
    let address = agent(credentials(node(), issue(&ours, &node()))).await;
    let router = credentials(controller(), issue(&ours, &controller()));
    let slow = TcpStream::connect(address).await.unwrap();
    let mut flood = Vec::new();
    for _ in 0..200 {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
        flood.push(socket.connect(address).await.unwrap());
    }
    // Ensures that all of them have been accepted before the test continues.
    let reach = reached(&router, node(), address);
    timeout(HANG_TIMEOUT, reach).await.unwrap().unwrap();
    let client = router.now().unwrap().client.clone();
    let connector = tokio_rustls::TlsConnector::from(client);
    let connected = timeout(HANG_TIMEOUT, connector.connect(node().0, slow)).await;
    let mut secured = connected.unwrap().unwrap();
    assert_eq!(secured.read_u8().await.unwrap(), b'!');
}

#[test]
fn a_certificate_that_is_not_valid_yet_names_the_clock() {
    let from = SystemTime::now() + 2 * HOUR;
    let validity = Validity {
        from,
        until: from + HOUR,
    };
    let bundle = authority().issue(&node(), validity).unwrap();
    let credentials = Credentials::of_bundle(node(), bundle).unwrap();
    assert!(!credentials.is_trusted());
    let why = credentials.distrust_reason().unwrap();
    assert!(why.contains("the clock of this machine is behind"), "{why}");
}

fn files(folder: &Path) -> Files {
    Files {
        certificate: folder.join("tls.crt"),
        key: folder.join("tls.key"),
        authorities: folder.join("ca.crt"),
    }
}

fn put(path: &Path, text: &[u8]) {
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(text).unwrap();
}

fn put_all(files: &Files, bundle: &Bundle) {
    put(&files.certificate, &bundle.certificate);
    put(&files.key, &bundle.key);
    put(&files.authorities, &bundle.authorities);
}

/// Waits until files are checked again.
async fn later() {
    sleep(Duration::from_millis(1100)).await;
}

#[tokio::test]
async fn files_that_change_are_used_for_new_connections_and_bad_ones_never() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let (old, new) = (authority(), authority());
    let files = files(folder.path());
    put_all(&files, &issue(&old, &node()));
    let agents = Arc::new(Credentials::of_files(node(), files.clone()).unwrap());
    let address = agent(agents.clone()).await;
    let router = credentials(controller(), issue(&old, &controller()));
    let mut standing = reached(&router, node(), address).await.unwrap();

    // Half written: the certificate exists, but its key does not match yet.
    let next = issue(&new, &node());
    put(&files.certificate, &next.certificate);
    later().await;
    reached(&router, node(), address).await.unwrap();
    put(&files.key, &next.key[..next.key.len() / 2]);
    later().await;
    reached(&router, node(), address).await.unwrap();
    // A certificate of another node.
    put_all(&files, &issue(&new, &Name::node("n2").unwrap()));
    later().await;
    reached(&router, node(), address).await.unwrap();
    std::fs::remove_file(&files.authorities).unwrap();
    later().await;
    reached(&router, node(), address).await.unwrap();

    put_all(&files, &next);
    later().await;
    let error = refusal(reached(&router, node(), address).await);
    assert!(error.contains("UnknownIssuer"), "{error}");
    router.replace(issue(&new, &controller())).unwrap();
    reached(&router, node(), address).await.unwrap();
    echo(&mut standing).await.unwrap();
}

#[tokio::test]
async fn authorities_that_overlap_are_changed_without_a_gap() {
    let (old, new) = (authority(), authority());
    let both = [old.certificate(), new.certificate()].concat();
    let of = |authority: &Authority, name: &Name| Bundle {
        authorities: both.clone().into(),
        ..issue(authority, name)
    };
    let agents = credentials(node(), issue(&old, &node()));
    let address = agent(agents.clone()).await;
    let router = credentials(controller(), issue(&old, &controller()));
    for (agents_own, routers_own) in [(&old, &old), (&old, &new), (&new, &new)] {
        router.replace(of(&old, &controller())).unwrap();
        agents.replace(of(agents_own, &node())).unwrap();
        reached(&router, node(), address).await.unwrap();
        router.replace(of(routers_own, &controller())).unwrap();
        reached(&router, node(), address).await.unwrap();
    }
    router.replace(issue(&new, &controller())).unwrap();
    agents.replace(issue(&new, &node())).unwrap();
    reached(&router, node(), address).await.unwrap();
}

#[test]
fn an_authority_is_the_same_after_it_was_read_again() {
    let ours = authority();
    let again = Authority::from_pem(ours.certificate(), &ours.key()).unwrap();
    let until = SystemTime::now() + 5 * HOUR;
    let validity = Validity {
        from: SystemTime::now(),
        until,
    };
    let bundle = again.issue(&node(), validity).unwrap();
    let credentials = Credentials::of_bundle(node(), bundle).unwrap();
    let seconds = until.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(credentials.expires(), Some(seconds.as_secs()));
}

#[test]
fn files_that_have_changed_say_when_the_certificate_expires() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let ours = authority();
    let files = files(folder.path());
    let until = |hours: u32| SystemTime::now() + HOUR * hours;
    let seconds = |at: SystemTime| {
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        Some(since.as_secs())
    };
    let put = |until: SystemTime| {
        let from = SystemTime::now();
        let bundle = ours.issue(&node(), Validity { from, until }).unwrap();
        put_all(&files, &bundle);
    };
    let first = until(5);
    put(first);
    let credentials = Credentials::of_files(node(), files.clone()).unwrap();
    assert_eq!(credentials.expires(), seconds(first));
    let second = until(9);
    put(second);
    // No connection is made in this time.
    let begun = std::time::Instant::now();
    while credentials.expires() != seconds(second) {
        assert!(begun.elapsed() < Duration::from_secs(30), "not seen");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn what_is_wrong_is_reported_with_its_file_and_without_the_key() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let ours = authority();
    let good = issue(&ours, &node());
    let files = files(folder.path());
    let problem = |bundle: &Bundle| {
        put_all(&files, bundle);
        let error = Credentials::of_files(node(), files.clone()).unwrap_err();
        chain(&error).replace(folder.path().to_str().unwrap(), "DIR")
    };
    let with = |change: fn(&mut Bundle)| {
        let mut bundle = good.clone();
        change(&mut bundle);
        bundle
    };
    let key_of_another = Bundle {
        key: issue(&ours, &node()).key,
        ..good.clone()
    };
    let all = [
        problem(&with(|bundle| bundle.certificate.clear())),
        problem(&with(|bundle| bundle.certificate.truncate(100))),
        problem(&with(|bundle| bundle.key.truncate(100))),
        problem(&with(|bundle| bundle.key = bundle.certificate.clone())),
        problem(&with(|bundle| bundle.authorities.clear())),
        problem(&key_of_another),
        problem(&issue(&ours, &controller())),
    ];
    insta::assert_snapshot!(all.join("\n"));
    std::fs::remove_file(&files.key).unwrap();
    let error = Credentials::of_files(node(), files.clone()).unwrap_err();
    assert!(chain(&error).contains("tls.key: No such file"), "{error}");
    assert_eq!(format!("{good:?}"), "Bundle { .. }");
}

#[test]
fn names_of_nodes_are_names_in_certificates_or_refused() {
    for good in ["n1", "N_1", "ip-10-0-0-1.eu.internal", "1"] {
        let name = Name::node(good).unwrap();
        assert_eq!(name.to_string(), format!("node.{good}.slackwater"));
    }
    for bad in ["", "a..b", "a b", "a-.b", &"x".repeat(64), "1.2.3.4\0"] {
        assert!(Name::node(bad).is_err(), "{bad:?}");
    }
}
