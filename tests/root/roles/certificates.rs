//! `slackwater certificates`, and the errors for unusable certificates.

use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use std::time::Duration;

use slackwater::tls::Files;

use crate::roles::fixture::*;
use slackwater_testkit::{Scratch, Server, slackwater};

fn certificates(scratch: &Scratch, more: &[&str]) -> Output {
    let out = scratch.join("made");
    slackwater()
        .args(["certificates", "--out", out.to_str().unwrap()])
        .args(more)
        .output()
        .unwrap()
}

fn bundle(scratch: &Scratch, stem: &str) -> slackwater::tls::Bundle {
    let path = |name: String| scratch.join("made").join(name);
    let files = Files {
        certificate: path(format!("{stem}.crt")),
        key: path(format!("{stem}.key")),
        authorities: path("ca.crt".into()),
    };
    files.read().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_creates_all_certificates_that_a_cluster_needs() {
    let scratch = Scratch::new();
    let created = certificates(&scratch, &["--node", NODE]);
    assert!(created.status.success(), "{created:?}");
    let all = [
        "ca.crt",
        "ca.key",
        "controller.crt",
        "controller.key",
        "node-node-1.crt",
        "node-node-1.key",
    ];
    let folder = scratch.join("made");
    assert_eq!(names(&folder), all);
    for name in all {
        let mode = std::fs::metadata(folder.join(name))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }

    let again = certificates(&scratch, &["--node", NODE]);
    assert_eq!(again.status.code(), Some(1));
    let message = String::from_utf8(again.stderr).unwrap();
    assert!(message.contains("is not overwritten"), "{message}");

    // A node that is added later has the same authority.
    let before = bundle(&scratch, "controller");
    assert!(certificates(&scratch, &["--node", "n2"]).status.success());
    assert_eq!(bundle(&scratch, "controller"), before);
    assert_eq!(names(&folder).len(), 8);

    let certificates = Certificates::new(&scratch, &bundle(&scratch, "node-node-1"));
    let server = agent(&scratch, &certificates);
    let router = credentials(controller(), before);
    client(&router, address(&server)).list().await.unwrap();
}

#[test]
fn certificates_that_cannot_be_used_are_one_sentence_and_exit_64() {
    let ours = authority();
    let scratch = Scratch::new();
    let certificates = Certificates::new(&scratch, &issue(&ours, &controller()));
    let reported = || {
        let _ = std::fs::remove_file(scratch.join("log"));
        let mut server = Server::spawn(
            &scratch,
            &["default=memory:"],
            &words(&flags(&certificates)),
            &[],
        );
        assert_eq!(server.wait(), Some(64));
        let message = server.log();
        assert_eq!(message.lines().count(), 1, "{message}");
        message.replace(scratch.path().to_str().unwrap(), "DIR")
    };
    let of_another = reported();
    std::fs::write(certificates.path("tls.key"), "secret").unwrap();
    let no_key = reported();
    std::fs::write(certificates.path("ca.crt"), "none").unwrap();
    let no_authority = reported();
    insta::assert_snapshot!([of_another, no_key, no_authority].concat());
}

/// A node that was rebooted while no authority could sign: its pods get their volumes nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_its_certificate_yet_serves_the_kubelet() {
    let ours = authority();
    let scratch = Scratch::new();
    let bundle = issue(&ours, &node());
    let certificates = Certificates::new(&scratch, &bundle);
    for name in ["tls.crt", "tls.key"] {
        std::fs::remove_file(certificates.path(name)).unwrap();
    }
    let server = agent(&scratch, &certificates);
    assert!(server.client().is_ready().await);
    let router = credentials(controller(), issue(&ours, &controller()));
    let at = address(&server);
    assert!(client(&router, at).list().await.is_err());

    certificates.put(&bundle);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    client(&router, at).list().await.unwrap();
}
