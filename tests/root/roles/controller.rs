//! A router as a process, with agents as processes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use crate::roles::fixture::*;
use slackwater_testkit::node::refused;
use slackwater_testkit::{Client, Scratch, Server, eventually, free_port, mount, slackwater};

const MIB: u64 = 1 << 20;

/// `slackwater serve --role controller`. It is killed when this is dropped.
struct Controller {
    child: Child,
    socket: PathBuf,
    metrics: SocketAddr,
}

impl Controller {
    fn start(scratch: &Scratch, certificates: &Certificates, agents: &[String]) -> Controller {
        let socket = scratch.dir("sidecars").join("csi.sock");
        let metrics: SocketAddr = ([127, 0, 0, 1], free_port()).into();
        let mut command = slackwater();
        command
            .args(["serve", "--role", "controller", "--endpoint"])
            .arg(format!("unix://{}", socket.display()))
            .args(["--metrics-address", &metrics.to_string()])
            .args(certificates.flags());
        for agent in agents {
            command.args(["--agent", agent]);
        }
        let log = std::fs::File::create(scratch.join("controller.log")).unwrap();
        let child = command.stdin(Stdio::null()).stderr(log).spawn().unwrap();
        eventually("a router that answers", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Controller {
            child,
            socket,
            metrics,
        }
    }

    fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.metrics).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn folder(&self) -> &Path {
        self.socket.parent().unwrap()
    }
}

/// The value of a metric without labels.
fn number(metrics: &str, name: &str) -> f64 {
    let mut lines = metrics.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = value.unwrap_or_else(|| panic!("no {name}:\n{metrics}"));
    value.trim().parse().unwrap()
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_serves_the_sidecars_with_the_volumes_of_its_agents() {
    let (of_agent, of_router) = (Scratch::new(), Scratch::new());
    let ours = authority();
    let server = agent(
        &of_agent,
        &Certificates::new(&of_agent, &issue(&ours, &node())),
    );
    let bundle = issue(&ours, &controller());
    let certificates = Certificates::new(&of_router, &bundle);
    let issued = credentials(controller(), bundle);
    let agents = [format!("{NODE}={}", address(&server))];
    let mut router = Controller::start(&of_router, &certificates, &agents);
    let client = router.client();
    eventually("a router that is ready", || {
        router.get("/readyz").contains("200 OK")
    });
    assert!(router.get("/healthz").contains("200 OK"));

    let id = client
        .create("v1", 8 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    assert_eq!(client.list().await.unwrap(), [id.as_str()]);
    let metrics = router.get("/metrics");
    let created = "slackwater_calls_total{method=\"CreateVolume\",code=\"OK\"} 1";
    assert!(metrics.contains(created), "{metrics}");
    assert!(
        !metrics.contains("slackwater_pool_"),
        "a router has no pools"
    );
    let own = issued.expires().unwrap();
    let shown = number(&metrics, "slackwater_certificate_expiry_seconds");
    assert!((shown - own as f64).abs() < 1.0, "{own}:\n{metrics}");
    assert!(server.log().contains("CreateVolume"));

    // The node that owns it is away, which is never "not found".
    drop(server);
    let message = refused(client.delete(&id).await, Code::Unavailable);
    assert!(message.contains(NODE), "{message}");

    assert_eq!(names(router.folder()), ["csi.sock"]);
    let pid = Pid::from_raw(i32::try_from(router.child.id()).unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    assert_eq!(router.child.wait().unwrap().code(), Some(0));
    assert_eq!(names(router.folder()), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_at_the_address_of_another_node_is_not_mistaken_for_it() {
    let (of_agent, of_router) = (Scratch::new(), Scratch::new());
    let ours = authority();
    let server: Server = agent(
        &of_agent,
        &Certificates::new(&of_agent, &issue(&ours, &node())),
    );
    let certificates = Certificates::new(&of_router, &issue(&ours, &controller()));
    let agents = [format!("n2={}", address(&server))];
    let router = Controller::start(&of_router, &certificates, &agents);
    let client = router.client();
    let message = refused(
        client.create("v1", 8 * MIB, mount("ext4"), &[]).await,
        Code::Unavailable,
    );
    assert!(message.contains("n2"), "{message}");
    assert!(!server.log().contains("CreateVolume"), "{}", server.log());
}
