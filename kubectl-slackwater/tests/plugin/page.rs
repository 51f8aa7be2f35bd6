//! `page`, as a process, with a small API server that forwards ports.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};

use crate::fixture::said;
use crate::port_forward_server::{Forwarding, PageServer, pod};

/// The program, and its lines on stderr.
struct Running {
    child: Child,
    address: SocketAddr,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Running {
    fn start(cluster: &Forwarding) -> Running {
        let mut command = cluster.command(&["page", "--port", "0"]);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let url = out.next().map(Result::unwrap);
        let address = url
            .as_deref()
            .and_then(|url| url.strip_prefix("http://")?.strip_suffix('/'));
        let address = address.unwrap_or_else(|| panic!("no URL: {url:?}"));
        Running {
            address: address.parse().unwrap(),
            child,
            lines,
        }
    }

    /// The next line on stderr.
    fn says(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a server answers; nothing if it closes the connection.
fn ask(mut stream: TcpStream) -> String {
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn the_page_of_a_pod_is_served_at_a_local_port_until_the_pod_ends_and_then_that_of_another() {
    let cluster = Forwarding::start();
    let first = PageServer::start("the page of a");
    cluster.serve_page("a", first.address);
    let mut running = Running::start(&cluster);
    assert_eq!(running.says(), "forwarding to port 9831 of pod storage/a");
    let silent = running.connect();
    for stream in [running.connect(), running.connect(), silent] {
        assert!(ask(stream).ends_with("the page of a"));
    }
    let second = PageServer::start("the page of b");
    cluster.serve_page("b", second.address);
    assert!(ask(running.connect()).ends_with("the page of b"));
    let expected =
        "forwarding to pod storage/a: it is NotFound; trying another pod of the controller";
    assert_eq!(running.says(), expected);
    assert_eq!(running.says(), "forwarding to port 9831 of pod storage/b");
    // The kubelet reports that nothing listens at the port. What it writes is not trusted.
    drop(second);
    assert_eq!(ask(running.connect()), "");
    let expected = "pod storage/b: the port refuses connections\\u{1b}";
    assert_eq!(running.says(), expected);
    let third = PageServer::start("");
    cluster.serve_page("c", third.address);
    assert_eq!(ask(running.connect()), "");
    assert_eq!(running.says(), "forwarding to port 9831 of pod storage/c");
    let expected = "pod storage/c: it has closed the connection without an answer";
    assert_eq!(running.says(), expected);
    // The next connection looks for a pod again.
    cluster.state.lock().unwrap().pods.clear();
    assert_eq!(ask(running.connect()), "");
    let line = running.says();
    assert!(
        line.starts_with("no pod of the controller of csi.slackwater.dev"),
        "{line}"
    );
    cluster.serve_page("d", first.address);
    assert!(ask(running.connect()).ends_with("the page of a"));
    assert_eq!(running.says(), "forwarding to port 9831 of pod storage/d");
}

#[test]
fn a_page_that_cannot_be_opened_is_refused_with_what_is_to_be_done() {
    let cluster = Forwarding::start();
    let says = |words: &[&str]| said(words, &cluster.command(words).output().unwrap());
    let mut all = vec![says(&["page"])];
    cluster.state.lock().unwrap().pods = vec![pod("a", &[])];
    all.push(says(&["page", "-n", "storage"]));
    let page = "--page-port=9831";
    cluster.state.lock().unwrap().pods = vec![pod("a", &[page])];
    cluster.state.lock().unwrap().denied = vec!["create"];
    all.push(says(&["page"]));
    cluster.state.lock().unwrap().only = Some("storage");
    all.push(says(&["page"]));
    all.push(says(&["page", "-n", "storage"]));
    insta::assert_snapshot!("page_refused", all.join("\n"));
    cluster.state.lock().unwrap().denied.clear();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let refused = says(&["page", "-n", "storage", "--port", &port]);
    let expected = format!("listening at port {port} of 127.0.0.1");
    assert!(
        refused.contains(&expected) && refused.contains("--port"),
        "{refused}"
    );
    assert!(refused.ends_with("exit code 1\n"), "{refused}");
}
