//! An agent's endpoint: the clients from which it accepts calls, their certificates, and its
//! shutdown.

use std::net::TcpStream;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;
use slackwater::csi;
use slackwater::tls::authority::Validity;
use slackwater::tls::{Bundle, Connector};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;
use tonic::transport::Uri;
use tower::Service;

use crate::roles::fixture::*;
use slackwater_testkit::{Client, Scratch, Server, WAIT_TIMEOUT, eventually, free_port, mount};

const MIB: u64 = 1 << 20;

/// The error of a call by a client that is not the router.
async fn refusal(client: &Client) -> String {
    let status = client.list().await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    let mut text = status.message().to_string();
    let mut next = std::error::Error::source(&status);
    while let Some(source) = next {
        text.push_str(&format!(": {source}"));
        next = source.source();
    }
    text
}

/// The content of /metrics.
fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    std::io::Write::write_all(&mut stream, request).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_accepts_calls_only_from_the_router() {
    let scratch = Scratch::new();
    let (ours, other) = (authority(), authority());
    let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
    let metrics = format!("127.0.0.1:{}", free_port());
    let mut flags = flags(&certificates);
    flags.extend(["--metrics-address".to_string(), metrics.clone()]);
    let server = Server::spawn(&scratch, &["default=memory:"], &words(&flags), &[]);
    server.wait_ready();
    let at = address(&server);

    let router = client(&credentials(controller(), issue(&ours, &controller())), at);
    let id = router
        .create("v1", 8 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    assert_eq!(router.list().await.unwrap(), [id.as_str()]);
    assert!(
        router
            .groups()
            .group_controller_get_capabilities(csi::GroupControllerGetCapabilitiesRequest {})
            .await
            .is_ok()
    );

    let of_node = client(&credentials(node(), issue(&ours, &node())), at);
    let message = refusal(&of_node).await;
    assert!(message.contains("BadCertificate"), "{message}");
    let foreign = Bundle {
        authorities: ours.certificate().into(),
        ..issue(&other, &controller())
    };
    let message = refusal(&client(&credentials(controller(), foreign), at)).await;
    assert!(message.contains("UnknownCA"), "{message}");
    let past = Validity {
        from: SystemTime::now() - 2 * HOUR,
        until: SystemTime::now() - HOUR,
    };
    let expired = ours.issue(&controller(), past).unwrap();
    let message = refusal(&client(&credentials(controller(), expired), at)).await;
    assert!(message.contains("CertificateExpired"), "{message}");
    let plain = tonic::transport::Endpoint::from_shared(format!("http://{at}")).unwrap();
    assert!(Client::over(plain.connect_lazy()).list().await.is_err());

    // The volume exists nevertheless. Each refusal is counted a moment later, and the first one is
    // logged with its reason.
    assert_eq!(router.list().await.unwrap(), [id.as_str()]);
    eventually("four refusals are counted", || {
        scrape(&metrics).contains("slackwater_connections_refused_total 4")
    });
    let log = server.log();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("refused connections"))
        .collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0].contains("certificate not valid for name"),
        "{lines:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn kubelet_and_router_each_have_their_own_calls() {
    let scratch = Scratch::new();
    let ours = authority();
    let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
    let server = agent(&scratch, &certificates);
    let at = address(&server);
    let kubelet = server.client();
    let router = client(&credentials(controller(), issue(&ours, &controller())), at);

    let mut of_node = kubelet.node();
    let info = of_node.node_get_info(csi::NodeGetInfoRequest {}).await;
    assert_eq!(info.unwrap().into_inner().node_id, NODE);
    let refused = kubelet.list().await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    let refused = router
        .node()
        .node_get_info(csi::NodeGetInfoRequest {})
        .await;
    assert_eq!(refused.unwrap_err().code(), Code::Unimplemented);

    let info = |client: &Client| {
        let mut identity = client.identity();
        async move {
            let info = identity.get_plugin_info(csi::GetPluginInfoRequest {}).await;
            info.unwrap().into_inner().name
        }
    };
    assert_eq!(info(&kubelet).await, info(&router).await);
    assert!(kubelet.is_ready().await && router.is_ready().await);

    // The kubelet can use what the router creates.
    let id = router
        .create("v1", 8 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    let staging = scratch.dir("kubelet").join("staging");
    kubelet.stage(&id, &staging, mount("ext4")).await.unwrap();
    let held = router.delete(&id).await.unwrap_err();
    assert_eq!(held.code(), Code::FailedPrecondition);
    kubelet.unstage(&id, &staging).await.unwrap();
    router.delete(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_certificates_apply_to_new_connections() {
    let scratch = Scratch::new();
    let (old, new) = (authority(), authority());
    let certificates = Certificates::new(&scratch, &issue(&old, &node()));
    let server = agent(&scratch, &certificates);
    let at = address(&server);
    let of_old = credentials(controller(), issue(&old, &controller()));
    let of_new = credentials(controller(), issue(&new, &controller()));
    let standing = client(&of_old, at);
    standing.list().await.unwrap();

    let later = || tokio::time::sleep(Duration::from_millis(1200));
    let key = certificates.path("tls.key");
    let next = issue(&new, &node());
    std::fs::write(&key, &next.key[..next.key.len() / 2]).unwrap();
    later().await;
    client(&of_old, at).list().await.unwrap();
    assert!(server.log().contains("using the previous ones"));

    certificates.put(&next);
    later().await;
    client(&of_new, at).list().await.unwrap();
    refusal(&client(&of_old, at)).await;
    standing.list().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_ends_its_handshake_delays_no_other_client() {
    let scratch = Scratch::new();
    let ours = authority();
    let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
    let server = agent(&scratch, &certificates);
    let at = address(&server);
    let idle: Vec<_> = (0..300).map(|_| TcpStream::connect(at).unwrap()).collect();
    let router = client(&credentials(controller(), issue(&ours, &controller())), at);
    let listed = tokio::time::timeout(WAIT_TIMEOUT, router.list());
    listed.await.expect("an answer").unwrap();
    drop(idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_both_servers_and_leaves_no_files_next_to_the_socket() {
    let scratch = Scratch::new();
    let ours = authority();
    let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
    let mut server = agent(&scratch, &certificates);
    let at = address(&server);
    let router = client(&credentials(controller(), issue(&ours, &controller())), at);
    router.list().await.unwrap();
    let folder = server.socket().parent().unwrap().to_path_buf();
    assert_eq!(names(&folder), ["csi.sock"]);
    // Neither an idle connection nor one without any data delays it.
    let silent = TcpStream::connect(at).unwrap();
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    assert_eq!(names(&folder), [""; 0]);
    assert!(
        TcpStream::connect(at).is_err(),
        "no process listens any more"
    );
    drop(silent);
}

/// A router that is cut off does not announce it: its freezes end when it no longer answers.
#[tokio::test(flavor = "multi_thread")]
async fn the_connection_of_a_router_that_stops_answering_is_closed() {
    let scratch = Scratch::new();
    let ours = authority();
    let certificates = Certificates::new(&scratch, &issue(&ours, &node()));
    let server = agent(&scratch, &certificates);
    let router = credentials(controller(), issue(&ours, &controller()));
    let mut connector = Connector::new(router, node(), address(&server));
    let agent = Uri::from_static("http://agent");
    let mut connection = connector.call(agent).await.unwrap();
    // HTTP/2 begins without settings; pings are never answered.
    let stream = connection.inner_mut();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .unwrap();
    let mut heard = Vec::new();
    let ended = tokio::time::timeout(WAIT_TIMEOUT, stream.read_to_end(&mut heard));
    // Any kind of end is accepted.
    let _ = ended.await.expect("the agent closes the connection");
    assert!(!heard.is_empty(), "the agent had received a ping before");
}
