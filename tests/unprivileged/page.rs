//! The status page in Chromium without a display, if it is installed: neither an error nor a violation of its
//! policy is logged.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and starts programs"
)]

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use slackwater::telemetry::page::world::{
    Agent, Claim, Cut, CutState, Cuts, Frozen, Grown, Growth, Images, Pool, Schedule, Source, Work,
    World,
};
use slackwater::telemetry::page::{listen, serve};
use slackwater_testkit::left_out;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Debian's packages of Chromium.
const BROWSERS: [&str; 2] = ["chromium-headless-shell", "chromium"];
const HOSTILE: &str = "<script>document.title = 'run'</script><img src=x onerror=alert(1)>";

/// A cluster with something in each part of the page.
fn world(schedule: &str) -> World {
    let now = Timestamp::now();
    let ago = |minutes: i64| now - SignedDuration::from_mins(minutes);
    let grown = |claim: &str, gib: u64| Grown {
        volume: "volume".into(),
        claim: Some(claim.into()),
        bytes: gib << 30,
        since: ago(24 * 60),
    };
    let pool = |number: u64| Pool {
        id: format!("11111111-2222-4333-8444-{number:012}"),
        name: "fast".into(),
        node: format!("node-{number}"),
        health: if number == 1 { "NotServed" } else { "Healthy" },
        is_well: number != 1,
        message: "its disk is not mounted".into(),
        since: Some(ago(55)),
        seen: Some(ago(if number == 2 { 9 } else { 0 })),
        total_bytes: 100 << 30,
        available_bytes: (20 + number * 20) << 30,
        promised_bytes: (30 * number) << 30,
        volumes: 3,
        snapshots: 12,
        frozen: match number {
            3 => vec![Frozen {
                volume: format!("11111111-2222-4333-8444-{number:012}.volume"),
                claim: Some("shop/logs".into()),
                since: ago(4),
                until: ago(-1),
                is_held: true,
            }],
            _ => Vec::new(),
        },
        // One that was not counted yet, and one of LVM.
        images: (number != 2).then(|| Images {
            own: 12 << 30,
            shared: if number == 3 { 0 } else { 18 << 30 },
            snapshots: if number == 3 { 0 } else { 6 << 30 },
            undivided: if number == 3 { 7 << 30 } else { 0 },
            measured: ago(25),
            ..Images::default()
        }),
        growth: (number != 2).then(|| Growth {
            measured: ago(25),
            volumes: vec![grown("shop/pg-data", 9 - 2 * number), grown("shop/logs", 1)],
        }),
        ..Pool::default()
    };
    let agent = |number: u64| Agent {
        node: format!("node-{number}"),
        version: "0.1.0".into(),
        seen: Some(now),
        has_guard: true,
        ..Agent::default()
    };
    let levels = ["application", "filesystem", "crash", ""];
    let cut = |number: usize| Cut {
        namespace: "shop".into(),
        name: format!("pg-{number}"),
        schedule: Some("u".into()),
        at: ago(60 * (number as i64 + 2)),
        level: Some(levels[number % 4].into()),
        state: match number {
            3 => CutState::Failed,
            _ => CutState::Ready,
        },
        ..Cut::default()
    };
    let single = |minutes: i64| Cut {
        namespace: "shop".into(),
        name: format!("logs-{minutes}"),
        schedule: Some("v".into()),
        claim: Some("logs".into()),
        at: ago(minutes),
        level: Some("filesystem".into()),
        frozen_ms: Some(14),
        ..Cut::default()
    };
    let mut cuts: Vec<Cut> = (0..12).map(cut).collect();
    cuts.extend([20, 80, 200].map(single));
    World {
        now,
        driver: "csi.slackwater.dev".into(),
        namespace: "slackwater".into(),
        router: "router-1".into(),
        problem: None,
        pools: (0..4).map(pool).collect(),
        agents: (0..4).map(agent).collect(),
        claims: vec![Claim {
            name: format!("shop/{HOSTILE}"),
            pool: pool(0).id,
        }],
        schedules: Some(vec![
            Schedule {
                namespace: "shop".into(),
                name: schedule.into(),
                uid: "u".into(),
                is_group: true,
                timetable: "every 1h".into(),
                last_cut: Some(ago(120)),
                level: Some("application".into()),
                overdue: Some(ago(60)),
                missed: 1,
                skipped: vec![ago(7 * 60 + 30)],
                ..Schedule::default()
            },
            Schedule {
                namespace: "shop".into(),
                name: "logs".into(),
                uid: "v".into(),
                timetable: "every 1h".into(),
                last_cut: Some(ago(20)),
                level: Some("filesystem".into()),
                skipped: vec![ago(140)],
                ..Schedule::default()
            },
        ]),
        cuts: Cuts {
            all: cuts,
            ..Cuts::default()
        },
        work: work(now, schedule),
        work_problem: None,
    }
}

/// A move, an evacuation, a claim whose pod is silent, and a revert.
fn work(now: Timestamp, source: &str) -> Vec<Work> {
    let ago = |minutes: i64| Some(now - SignedDuration::from_mins(minutes));
    let of = |resource: &'static str, name: &str, what: &str, phase: &str| Work {
        resource,
        name: name.into(),
        what: what.into(),
        phase: phase.into(),
        since: ago(25),
        ..Work::default()
    };
    let copy = |resource: &'static str, name: &str, what: &str, phase: &str| Work {
        namespace: "shop".into(),
        done_bytes: 3 << 30,
        total_bytes: 10 << 30,
        copying_since: ago(5),
        ..of(resource, name, what, phase)
    };
    let node = "move of claim shop/data to node node-3";
    let filled = format!("claim shop/{source} is filled from HttpSource");
    let evacuation = "evacuation of pool fast of node node-0";
    vec![
        copy("volumemoves", "away", node, "Copying"),
        Work {
            namespace: String::new(),
            volumes: Some((3, 8)),
            message: "in it are 5 volumes of claims".into(),
            ..copy(
                "pools",
                "11111111-2222-4333-8444-000000000000",
                evacuation,
                "5 left",
            )
        },
        Work {
            reported: ago(14),
            ..copy("httpsources", source, &filled, "Populating")
        },
        Work {
            namespace: "shop".into(),
            volumes: Some((1, 3)),
            deadline: ago(-9),
            ..of(
                "volumereverts",
                "back",
                "revert to snapshot pg-nightly",
                "Preparing",
            )
        },
    ]
}

/// The name of a schedule.
struct Fixed(&'static str);

impl Source for Fixed {
    fn world(&self) -> Pin<Box<dyn Future<Output = World> + Send + '_>> {
        Box::pin(async { world(self.0) })
    }
}

/// The browser that is installed.
fn browser() -> Option<&'static str> {
    let is_there = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    BROWSERS.into_iter().find(is_there)
}

/// What a browser has logged, and the document that it has made of the page.
async fn browse(folder: &Path, options: &[&str], url: String) -> (String, String) {
    let mut command = Command::new(browser().unwrap());
    command
        .args([
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            "--no-first-run",
        ])
        .args(["--disable-dev-shm-usage", "--disable-background-networking"])
        .args(["--enable-logging=stderr", "--dump-dom"])
        .arg(format!("--user-data-dir={}", folder.display()))
        .env("HOME", folder)
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_CACHE_HOME", folder)
        .args(options)
        .arg(url);
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = output.await.unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let logged = text(&output.stderr);
    assert!(output.status.success(), "{logged}");
    let console = logged.lines().filter(|line| line.contains("CONSOLE"));
    (console.collect::<Vec<_>>().join("\n"), text(&output.stdout))
}

/// A page with the policy of the status page, and a script that the policy forbids.
async fn forbidden_script() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let body = "<p>before</p><script>document.title = 'run'</script>";
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-security-policy: default-src 'none'\r\nconnection: close";
            let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_logs_no_error_and_no_violation() {
    if browser().is_none() {
        left_out(
            "the status page in a browser: none is installed (Debian: chromium-headless-shell)",
        );
        return;
    }
    let folder = tempfile::Builder::new()
        .prefix("slackwater-page-")
        .tempdir();
    let folder = folder.unwrap();
    let control = forbidden_script().await;
    let (console, _) = browse(folder.path(), &[], format!("http://{control}/")).await;
    assert!(
        console.contains("Content Security Policy"),
        "violations are seen: {console:?}"
    );

    let pictures = std::env::var_os("SLACKWATER_SCREENSHOTS");
    let name = if pictures.is_some() { "pg" } else { HOSTILE };
    let listener = listen(0).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(serve(
        listener,
        Arc::new(Fixed(name)),
        std::future::pending(),
    ));
    for (name, size, scheme) in [
        (
            "wide",
            "1280,2840",
            "--blink-settings=preferredColorScheme=1",
        ),
        (
            "dark",
            "1280,2840",
            "--blink-settings=preferredColorScheme=0",
        ),
        (
            "narrow",
            "500,7400",
            "--blink-settings=preferredColorScheme=1",
        ),
    ] {
        let size = format!("--window-size={size}");
        let picture = pictures.as_ref().map(|folder| {
            let file = Path::new(folder).join(format!("{name}.png"));
            format!("--screenshot={}", file.display())
        });
        let mut options = vec![size.as_str(), scheme];
        options.extend(picture.as_deref());
        let url = format!("http://localhost:{port}/?q=");
        let (console, document) = browse(folder.path(), &options, url).await;
        assert_eq!(console, "", "{name}");
        if picture.is_none() {
            assert!(
                document.contains("4 things are wrong."),
                "{name}: {document}"
            );
            assert!(document.contains("&lt;script&gt;"), "{name}: {document}");
            for text in [
                "3 of 8 volumes",
                "about 11 min",
                "outdated</span>, was Populating",
            ] {
                assert!(document.contains(text), "{name}: {text}: {document}");
            }
            assert!(
                !document.contains("<script") && !document.contains("<img"),
                "{name}"
            );
        }
    }
}
