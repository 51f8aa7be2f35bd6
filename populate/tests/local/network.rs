//! Redirects, Secrets, addresses, proxies, and servers that are slow or lie.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;
use slackwater_populate::failure::Next;
use slackwater_populate::net::address::{API_SERVER, Policy};

use crate::server::{Request, Server, Step, Steps, Tls, is_up, redirect, reply, serves};
use crate::support::{Volume, digest, fill, fill_with, policy};

#[test]
fn without_the_policy_of_tests_this_machine_is_refused() {
    let server = serves(b"x".to_vec());
    assert!(is_up(&server));
    let port = server.address.port();
    let strict = Policy {
        private_networks: true,
        known: Vec::new(),
    };
    for host in [
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "[::]",
        "0x7f.1",
        "2130706433",
    ] {
        let url = format!("http://{host}:{port}/x");
        let outcome = fill_with(&Volume::new().config(&url, json!({})), strict.clone());
        assert_eq!(
            outcome.failure("AddressRefused").next,
            Next::Nothing,
            "{host}"
        );
    }
    assert!(server.requests().is_empty());
}

#[test]
fn the_api_server_is_refused_also_behind_a_redirect() {
    let inside = Server::at("127.0.0.3", None, |_| reply("200 OK", &[], b"secret"));
    let to = inside.url("/x");
    let server = Server::new(move |_| redirect(&to));
    let mut policy = policy();
    policy
        .known
        .push(("127.0.0.3".parse().expect("an address"), API_SERVER));
    let outcome = fill_with(&Volume::new().config(&server.url("/x"), json!({})), policy);
    assert_eq!(outcome.failure("AddressRefused").next, Next::Nothing);
    assert!(inside.requests().is_empty());
}

#[test]
fn a_public_server_does_not_redirect_to_a_private_one() {
    let private = serves(b"private".to_vec());
    let to = private.url("/x");
    let public = Server::at("127.0.0.2", None, move |_| redirect(&to));
    let outcome = fill(&Volume::new().config(&public.url("/x"), json!({})));
    assert_eq!(outcome.failure("AddressRefused").next, Next::Nothing);
    assert!(private.requests().is_empty());
    // The other way it may, and also by a private one in between.
    let end = Server::at("127.0.0.2", None, |_| reply("200 OK", &[], b"public"));
    let to = end.url("/x");
    let private = Server::new(move |_| redirect(&to));
    let volume = Volume::new();
    fill(&volume.config(&private.url("/x"), json!({}))).good();
    assert_eq!(volume.read("disk.img"), b"public");
}

#[test]
fn private_networks_can_be_switched_off() {
    let server = serves(b"x".to_vec());
    let policy = Policy {
        private_networks: false,
        ..policy()
    };
    let outcome = fill_with(&Volume::new().config(&server.url("/x"), json!({})), policy);
    outcome.failure("AddressRefused");
}

#[test]
fn redirects_are_followed_up_to_their_limit() {
    let step = |request: &Request| -> Steps {
        let left: u32 = request.path()[1..].parse().expect("a number");
        match left {
            0 => reply("200 OK", &[], b"end"),
            left => redirect(&format!("/{}", left - 1)),
        }
    };
    let server = Server::new(step);
    let volume = Volume::new();
    fill(&volume.config(&server.url("/10"), json!({}))).good();
    assert_eq!(volume.read("disk.img"), b"end");
    let outcome = fill(&volume.config(&server.url("/11"), json!({})));
    assert_eq!(outcome.failure("RedirectRefused").next, Next::Nothing);
    let outcome = fill(&volume.config(&server.url("/3"), json!({"limits": {"redirects": 2}})));
    outcome.failure("RedirectRefused");
    for to in [
        "ftp://a.example/",
        "file:///etc/passwd",
        "http://u:p@127.0.0.1/",
        "http://[",
        "",
    ] {
        let server = Server::new(move |request| match request.path() {
            "/x" => redirect(to),
            _ => reply("200 OK", &[], b""),
        });
        let outcome = fill(&Volume::new().config(&server.url("/x"), json!({})));
        if to.is_empty() {
            outcome.failure("RedirectRefused");
        } else {
            assert_eq!(outcome.result.expect_err(to).next, Next::Nothing, "{to}");
        }
    }
}

#[test]
fn https_is_never_left_for_http() {
    let tls = Tls::new();
    let plain = serves(b"plain".to_vec());
    let to = plain.url("/x");
    let server = Server::at("127.0.0.1", Some(&tls), move |_| redirect(&to));
    let volume = Volume::new();
    let secret = volume.secret(&[server.origin()], &tls.authority);
    let outcome = fill(&volume.config(&server.url("/x"), json!({"secret": secret})));
    assert_eq!(outcome.failure("RedirectRefused").next, Next::Nothing);
    assert!(plain.requests().is_empty());
}

#[test]
fn a_secret_is_sent_to_its_origin_alone() {
    let tls = Tls::new();
    let other = Server::at("127.0.0.1", Some(&tls), |_| {
        reply("200 OK", &[], b"content")
    });
    let to = other.url("/x");
    let server = Server::at("127.0.0.1", Some(&tls), move |request| {
        match request.path() {
            "/here" => redirect("/there"),
            _ => redirect(&to),
        }
    });
    let volume = Volume::new();
    // Also to an origin that is listed, no redirect takes it.
    let secret = volume.secret(&[server.origin(), other.origin()], &tls.authority);
    fill(&volume.config(&server.url("/here"), json!({"secret": secret}))).good();
    let sent = |server: &Server| -> Vec<bool> {
        let requests = server.requests().into_iter();
        requests
            .map(|request| request.header("authorization") == Some("Bearer hunter2"))
            .collect()
    };
    assert_eq!(sent(&server), [true, true]);
    assert_eq!(sent(&other), [false]);
}

#[test]
fn a_secret_that_does_not_list_the_origin_stops_the_attempt() {
    let tls = Tls::new();
    let server = Server::at("127.0.0.1", Some(&tls), |_| reply("200 OK", &[], b""));
    let volume = Volume::new();
    let secret = volume.secret(&["https://127.0.0.1".to_string()], &tls.authority);
    let outcome = fill(&volume.config(&server.url("/x"), json!({"secret": secret})));
    let failure = outcome.failure("SecretRefused");
    assert!(
        failure.to_string().contains(&server.origin()) && !failure.to_string().contains("hunter2")
    );
    let plain = serves(b"x".to_vec());
    let secret = volume.secret(&[plain.origin()], "");
    let outcome = fill(&volume.config(&plain.url("/x"), json!({"secret": secret})));
    outcome.failure("SecretRefused");
    assert!(server.requests().is_empty() && plain.requests().is_empty());
}

#[test]
fn a_server_needs_a_certificate_that_is_trusted() {
    let tls = Tls::new();
    let server = Server::at("127.0.0.1", Some(&tls), |_| reply("200 OK", &[], b"x"));
    let volume = Volume::new();
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("TlsFailed").next, Next::Again);
    let bundle = volume.folder.path().join("bundle");
    fs::write(&bundle, &tls.authority).expect("a file");
    fill(&volume.config(&server.url("/x"), json!({"network": {"caBundle": bundle}}))).good();
    fs::write(&bundle, Tls::new().authority).expect("a file");
    let outcome = fill(&volume.config(&server.url("/x"), json!({"network": {"caBundle": bundle}})));
    outcome.failure("TlsFailed");
    let inline = |authority: &str| json!({"network": {"certificates": authority}});
    fill(&Volume::new().config(&server.url("/x"), inline(&tls.authority))).good();
    let outcome = fill(&volume.config(&server.url("/x"), inline(&Tls::new().authority)));
    outcome.failure("TlsFailed");
    let cut = tls.authority.replace("-----END", "");
    let outcome = fill(&volume.config(&server.url("/x"), inline(&cut)));
    outcome.failure("ConfigurationInvalid");
}

#[test]
fn a_silent_server_and_a_slow_one_are_given_up() {
    let wait = || Step::Wait(Duration::from_secs(20));
    let nothing = Server::new(move |_| vec![wait()]);
    let half = Server::new(move |_| {
        let mut steps = reply("200 OK", &["X: y"], &[1; 100]);
        if let Some(Step::Send(bytes)) = steps.first_mut() {
            bytes.truncate(bytes.len() - 50);
        }
        steps.push(wait());
        steps
    });
    for server in [&nothing, &half] {
        let begun = Instant::now();
        let limits = json!({"limits": {"silenceSeconds": 1}});
        let outcome = fill(&Volume::new().config(&server.url("/x"), limits));
        assert_eq!(outcome.failure("ServerSilent").next, Next::Again);
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
    // One byte a while is no silence, but the time of the attempt ends.
    let slow = Server::new(|_| {
        let byte = || [Step::Send(vec![1]), Step::Wait(Duration::from_millis(300))];
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n".to_vec();
        std::iter::once(Step::Send(head))
            .chain((0..100).flat_map(|_| byte()))
            .collect()
    });
    let begun = Instant::now();
    let limits = json!({"limits": {"silenceSeconds": 1, "seconds": 3}});
    let outcome = fill(&Volume::new().config(&slow.url("/x"), limits));
    assert_eq!(outcome.failure("TimeLimit").next, Next::Again);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn lengths_and_headers_that_lie_are_failures() {
    let longer = "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123".to_string();
    let two = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\n12345".to_string();
    let chunks = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n".to_string();
    let invalid = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".to_string();
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "X: y\r\n".repeat(200));
    let large = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "y".repeat(200_000));
    let other = "SSH-2.0-OpenSSH\r\n".to_string();
    for text in [
        longer,
        two,
        chunks,
        invalid,
        many,
        large,
        other,
        String::new(),
    ] {
        let bytes = text.clone().into_bytes();
        let server = Server::new(move |_| vec![Step::Send(bytes.clone())]);
        let outcome = fill(&Volume::new().config(&server.url("/x"), json!({})));
        let begin: String = text.chars().take(60).collect();
        assert_eq!(
            outcome.failure("TransferFailed").next,
            Next::Again,
            "{begin}"
        );
    }
}

#[test]
fn a_status_decides_whether_another_attempt_helps() {
    for (status, next) in [
        ("404 Not Found", Next::Nothing),
        ("403 Forbidden", Next::Nothing),
        ("503 Busy", Next::Again),
        ("429 Too Many Requests", Next::Again),
        ("204 No Content", Next::Nothing),
    ] {
        let server = Server::new(move |_| reply(status, &[], b""));
        let outcome = fill(&Volume::new().config(&server.url("/x?signature=hunter2"), json!({})));
        let failure = outcome.failure("ServerRefused");
        assert_eq!(failure.next, next, "{status}");
        assert!(
            !failure.to_string().contains("hunter2"),
            "a query may be a secret"
        );
    }
    let gone = serves(Vec::new()).address.port();
    let url = format!("http://127.0.0.1:{}/x", if gone > 1 { 1 } else { 2 });
    let outcome = fill(&Volume::new().config(&url, json!({})));
    assert_eq!(outcome.failure("ConnectFailed").next, Next::Again);
}

#[test]
fn a_proxy_is_asked_for_a_connection() {
    // It answers for the server itself, whose name is not resolved here.
    let proxy = Server::new(|request| match request.line.as_str() {
        "CONNECT inside.example:8080 HTTP/1.1" => {
            let tunnel = b"HTTP/1.1 200 Connection established\r\n\r\n".to_vec();
            let mut steps = vec![Step::Send(tunnel), Step::Read];
            steps.extend(reply("200 OK", &[], b"through"));
            steps
        }
        _ => reply("403 Forbidden", &[], b""),
    });
    let network = json!({"network": {"proxy": proxy.origin()}});
    let volume = Volume::new();
    fill(&volume.config("http://inside.example:8080/x", network.clone())).good();
    assert_eq!(volume.read("disk.img"), b"through");
    let outcome = fill(&volume.config("http://other.example/x", network.clone()));
    assert_eq!(outcome.failure("ProxyFailed").next, Next::Again);
    let count = proxy.requests().len();
    let outcome = fill(&volume.config("http://169.254.169.254/x", network));
    assert_eq!(outcome.failure("AddressRefused").next, Next::Nothing);
    assert_eq!(proxy.requests().len(), count);
}

#[test]
fn an_object_without_an_end_needs_a_checksum() {
    let server = Server::new(|_| vec![Step::Send(b"HTTP/1.1 200 OK\r\n\r\ncontent".to_vec())]);
    let volume = Volume::new();
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("TransferFailed").next, Next::Nothing);
    let sum = digest(b"content");
    let source = json!({"source": {"http": {"unverified": false, "sha256": sum}}});
    fill(&volume.config(&server.url("/x"), source)).good();
    assert_eq!(volume.read("disk.img"), b"content");
    let chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let server = Server::new(|_| vec![Step::Send(chunks.to_vec())]);
    fill(&volume.config(&server.url("/x"), json!({}))).good();
    assert_eq!(volume.read("disk.img"), b"abc");
}
