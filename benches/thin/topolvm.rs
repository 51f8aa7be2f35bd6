//! The life of a volume and of a snapshot, compared with `lvmd`, TopoLVM's daemon on each node, which
//! runs LVM's programs. Both use a thin pool of their own in the same volume group, and are called
//! over a unix socket. `LVMD` is the path of the program, which TopoLVM's sources build.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use slackwater_testkit::{eventually, mount, run};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::fixture::{Fixture, GROUP, SIZE, text};
use super::hand::write_back;
use super::measure::{Pairs, Spread, given, timed};

const CLASS: &str = "thin";

/// The fields of lvmd's requests CreateLV, CreateLVSnapshot and RemoveLV that are used here. The
/// numbers are those of TopoLVM's docs/lvmd-protocol.md.
#[derive(Clone, PartialEq, prost::Message)]
struct CreateVolume {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "4")]
    device_class: String,
    #[prost(int64, tag = "6")]
    size_bytes: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CreateSnapshot {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "3")]
    device_class: String,
    #[prost(string, tag = "4")]
    source_volume: String,
    #[prost(string, tag = "6")]
    access_type: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Remove {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    device_class: String,
}

/// No field of an answer is read.
#[derive(Clone, PartialEq, prost::Message)]
struct Answer {}

/// A running lvmd.
struct Lvmd<'a> {
    fixture: &'a Fixture,
    channel: Channel,
    process: Child,
}

impl<'a> Lvmd<'a> {
    fn start(fixture: &'a Fixture, program: &str) -> Lvmd<'a> {
        fixture.group.pool("lvmd", "4G", "64k");
        let socket = fixture.scratch.join("lvmd.sock");
        let configuration = fixture.scratch.join("lvmd.yaml");
        let text = format!(
            "socket-name: {}\n\
             lvm-command-prefix: [/sbin/lvm]\n\
             device-classes:\n\
             - name: {CLASS}\n  volume-group: {GROUP}\n  type: thin\n  default: true\n  \
               thin-pool: {{name: lvmd, overprovision-ratio: 4.0}}\n",
            socket.display()
        );
        std::fs::write(&configuration, text).expect("its configuration");
        let process = Command::new(program)
            .arg("--config")
            .arg(&configuration)
            .stderr(Stdio::null())
            .spawn();
        let process = process.expect("lvmd starts");
        eventually("lvmd listens", || UnixStream::connect(&socket).is_ok());
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        let endpoint = endpoint.expect("a plain path");
        let channel = fixture.runtime.block_on(endpoint.connect());
        Lvmd {
            fixture,
            channel: channel.expect("lvmd listens"),
            process,
        }
    }

    fn call(&self, method: &'static str, request: impl prost::Message + 'static) {
        let done = self.fixture.runtime.block_on(async {
            let mut client = Grpc::new(self.channel.clone());
            client.ready().await.expect("lvmd listens");
            let path = PathAndQuery::from_static(method);
            let codec = ProstCodec::<_, Answer>::default();
            client
                .unary(tonic::Request::new(request), path, codec)
                .await
        });
        done.expect("the call succeeds");
    }

    fn end(mut self) {
        let pid = Pid::from_raw(self.process.id().cast_signed());
        kill(pid, Signal::SIGTERM).expect("lvmd runs");
        self.process.wait().expect("lvmd ends");
        self.fixture.group.remove_pool("lvmd");
    }
}

/// The same calls with both, in turns. A name is that of a volume and of its snapshot.
struct Life<'a> {
    lvmd: &'a Lvmd<'a>,
    name: String,
    staging: [PathBuf; 2],
    volume: String,
    snapshot: String,
}

const CALLS: [&str; 4] = ["create", "snapshot", "delete a snapshot", "delete"];

impl Life<'_> {
    fn ours(&mut self, call: &str) {
        let (client, name) = (&self.lvmd.fixture.client, &self.name);
        let done = self.lvmd.fixture.runtime.block_on(async {
            match call {
                "create" => {
                    self.volume = client.create(name, SIZE, mount("ext4"), &[]).await?;
                }
                "snapshot" => {
                    let created = client.snapshot(name, &self.volume, &[]).await?;
                    self.snapshot = created.snapshot_id;
                }
                "delete a snapshot" => client.delete_snapshot(&self.snapshot).await?,
                _ => client.delete(&self.volume).await?,
            }
            Ok::<_, tonic::Status>(())
        });
        done.expect("the call succeeds");
    }

    fn theirs(&self, call: &str) {
        let (name, device_class) = (self.name.clone(), CLASS.to_string());
        let snapshot = format!("{name}-s");
        let remove = |name| {
            let device_class = CLASS.to_string();
            self.lvmd
                .call("/proto.LVService/RemoveLV", Remove { name, device_class });
        };
        match call {
            "create" => {
                let request = CreateVolume {
                    name,
                    device_class,
                    size_bytes: SIZE.cast_signed(),
                };
                self.lvmd.call("/proto.LVService/CreateLV", request);
            }
            "snapshot" => {
                let request = CreateSnapshot {
                    name: snapshot,
                    device_class,
                    source_volume: name,
                    access_type: "rw".into(),
                };
                self.lvmd.call("/proto.LVService/CreateLVSnapshot", request);
            }
            "delete a snapshot" => remove(snapshot),
            _ => remove(name),
        }
    }

    /// Both volumes have a mounted ext4 while they are snapshotted, with nothing to write back.
    fn mount(&self) {
        let client = &self.lvmd.fixture.client;
        let staged = client.stage(&self.volume, &self.staging[0], mount("ext4"));
        let staged = self.lvmd.fixture.runtime.block_on(staged);
        staged.expect("stage");
        let (device, at) = (
            format!("/dev/{GROUP}/{}", self.name),
            text(&self.staging[1]),
        );
        run("mkfs.ext4", &["-q", &device]);
        run("mount", &[&device, at]);
        self.staging.iter().for_each(|path| write_back(path));
    }

    fn unmount(&self) {
        let client = &self.lvmd.fixture.client;
        let unstaged = client.unstage(&self.volume, &self.staging[0]);
        let unstaged = self.lvmd.fixture.runtime.block_on(unstaged);
        unstaged.expect("unstage");
        run("umount", &[text(&self.staging[1])]);
        run("udevadm", &["settle"]);
    }
}

pub fn measure() {
    let Ok(program) = std::env::var("LVMD") else {
        println!("left out: TopoLVM (LVMD is not the path of its lvmd)");
        return;
    };
    let rounds = given("ROUNDS", 6);
    let fixture = Fixture::new(false);
    let lvmd = Lvmd::start(&fixture, &program);
    let mut times: [Pairs; CALLS.len()] = Default::default();
    for round in 0..=rounds {
        let name = format!("topolvm-{round}");
        let mut life = Life {
            lvmd: &lvmd,
            staging: ["ours", "theirs"].map(|who| fixture.staging(&format!("{name}-{who}"))),
            name,
            volume: String::new(),
            snapshot: String::new(),
        };
        for (call, pairs) in CALLS.iter().zip(&mut times) {
            let mut took = [0.0; 2];
            for turn in 0..2 {
                let who = (round + turn) % 2;
                took[who] = match who {
                    0 => timed(|| life.ours(call)).1,
                    _ => timed(|| life.theirs(call)).1,
                };
            }
            // The first round is a warm-up.
            if round > 0 {
                pairs.add(took[1], took[0]);
            }
            match *call {
                "create" => life.mount(),
                "snapshot" => life.unmount(),
                _ => {}
            }
        }
    }
    lvmd.end();
    fixture.end();
    println!("\n{rounds} rounds; ms, medians and quartiles\n");
    println!("| call | driver | lvmd | lvmd / driver |");
    println!("|---|---|---|---|");
    for (call, pairs) in CALLS.iter().zip(&times) {
        let ours = Spread::of(pairs.hand.iter().copied());
        let theirs = Spread::of(pairs.ours.iter().copied());
        println!("| {call} | {ours} | {theirs} | {} |", pairs.ratio());
    }
}
