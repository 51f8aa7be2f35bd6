//! Callers that disconnect during a call: the work goes on, and a repeat meets it or its result.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use slackwater::csi::*;
use slackwater::host::memory::{FaultMode, MemoryHost};
use slackwater::host::{Effect, Host};
use slackwater::model::Alpha;
use slackwater::operation::Settings;
use tonic::{Code, Request};

use crate::service::gate::{GatedHost, Opens, gated};
use crate::service::harness::*;

/// More than anything takes that does not wait for a disk.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until a condition holds, without a limit: a test that hangs is ended from outside.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    while !is_so().await {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn idle(node: &Node) {
    until(async || node.driver.running() == 0).await;
}

#[tokio::test]
async fn a_repeat_while_the_work_runs_is_aborted_and_then_meets_the_result() {
    let (host, node) = gated().await;
    node.abandon_create(&host).await;
    for _ in 0..3 {
        let status = node
            .controller
            .clone()
            .create_volume(create("v"))
            .await
            .unwrap_err();
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
    }
    // Other calls are not held up by it.
    let list = node
        .controller
        .clone()
        .list_volumes(ListVolumesRequest::default())
        .await;
    assert!(
        list.unwrap().into_inner().entries.is_empty(),
        "a half-made volume is not listed"
    );
    assert_eq!(node.driver.running(), 1);

    host.open();
    idle(&node).await;
    let effects = node.host.effects();
    let volume = node.create("v").await;
    assert_eq!(node.host.effects(), effects, "the result existed already");
    let list = node
        .controller
        .clone()
        .list_volumes(ListVolumesRequest::default())
        .await;
    let entries = list.unwrap().into_inner().entries;
    assert_eq!(
        entries[0].volume.as_ref().unwrap().volume_id,
        volume.volume_id
    );
    assert_eq!(entries.len(), 1);
    node.stop().await;
}

#[tokio::test]
async fn a_deadline_ends_the_call_and_not_the_work() {
    let (host, node) = gated().await;
    let id = node.create("v").await.volume_id;
    host.close("format");
    // On a slow machine, the deadline may be reached before the work begins.
    for milliseconds in [50, 500, 5000, 50_000] {
        let mut request = Request::new(stage(&id));
        request.set_timeout(Duration::from_millis(milliseconds));
        let mut caller = node.node.clone();
        let status = caller.node_stage_volume(request).await.unwrap_err();
        // Or the work of the previous call begins only after its deadline.
        let met = milliseconds > 50 && status.code() == Code::Aborted;
        assert!(
            met || matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
            "{status:?}"
        );
        if node.driver.running() > 0 {
            break;
        }
    }
    host.reached(1).await;
    let status = node
        .node
        .clone()
        .node_stage_volume(stage(&id))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    let status = node
        .controller
        .clone()
        .delete_volume(delete(&id))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Aborted);
    host.open();
    idle(&node).await;
    node.node
        .clone()
        .node_stage_volume(stage(&id))
        .await
        .unwrap();
    assert_eq!(node.driver.volumes.formats(), 1);
    node.stop().await;
}

#[tokio::test]
async fn a_shutdown_waits_for_work_whose_caller_went_away() {
    let (host, node) = gated().await;
    node.abandon_create(&host).await;
    let (driver, path) = (node.driver.clone(), node.path.clone());
    let stopping = node.begin_stop();
    // The socket accepts no connections any more.
    until(async || tokio::net::UnixStream::connect(&path).await.is_err()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!stopping.served.is_finished(), "the shutdown waits");
    host.open();
    stopping.served.await.unwrap().unwrap();
    assert_eq!(driver.running(), 0);
    assert!(!path.exists());
}

#[tokio::test]
async fn a_call_that_runs_at_the_shutdown_is_answered() {
    let (host, node) = gated().await;
    host.close("allocate");
    let caller = node.controller.clone();
    let call = tokio::spawn(async move { caller.clone().create_volume(create("v")).await });
    host.reached(1).await;
    let stopping = node.begin_stop();
    tokio::time::sleep(Duration::from_millis(50)).await;
    host.open();
    assert!(call.await.unwrap().is_ok());
    stopping.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_ever() {
    const WAIT_TIMEOUT: Duration = Duration::from_millis(1500);
    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let theirs = Arc::new(host.clone());
    let node =
        Node::with_drain_timeout(WAIT_TIMEOUT, machine, theirs, Alpha::default(), |_| {}).await;
    host.close("allocate");
    let caller = node.controller.clone();
    let call = tokio::spawn(async move { caller.clone().create_volume(create("v")).await });
    host.reached(1).await;
    let before = std::time::Instant::now();
    let path = node.path.clone();
    let stopping = node.begin_stop();
    stopping.served.await.unwrap().unwrap();
    assert!(before.elapsed() >= WAIT_TIMEOUT);
    assert!(!path.exists(), "the socket is removed all the same");
    host.open();
    let _ = call.await;
}

#[tokio::test]
async fn a_snapshot_waits_for_its_volume_without_a_thread_and_other_calls_do_not_wait() {
    let (host, node) = gated().await;
    let id = node.create("v").await.volume_id;
    host.close("format");
    let mut stager = node.node.clone();
    let volume = id.clone();
    let staged = tokio::spawn(async move { stager.node_stage_volume(stage(&volume)).await });
    host.reached(1).await;
    // A call without more time than the work takes is refused at once.
    let mut controller = node.controller.clone();
    let mut hurried = Request::new(snapshot("s", &id));
    hurried.set_timeout(Duration::from_secs(5));
    let status = controller.create_snapshot(hurried).await.unwrap_err();
    assert_eq!(status.code(), Code::Aborted, "{status:?}");
    let status = controller.delete_volume(delete(&id)).await.unwrap_err();
    assert_eq!(status.code(), Code::Aborted, "{status:?}");
    let (one, many) = (
        (controller.clone(), id.clone()),
        (node.groups.clone(), id.clone()),
    );
    let waiting = [
        tokio::spawn(async move {
            let (mut controller, id) = one;
            let mut request = Request::new(snapshot("s", &id));
            request.set_timeout(Duration::from_secs(300));
            controller.create_snapshot(request).await.map(drop)
        }),
        tokio::spawn(async move {
            let (mut groups, id) = many;
            let mut request = Request::new(group("g", &[&id]));
            request.set_timeout(Duration::from_secs(300));
            groups.create_volume_group_snapshot(request).await.map(drop)
        }),
    ];
    // A caller that disconnects while it waits leaves nothing behind.
    let mut gone = controller.clone();
    let source = id.clone();
    let gone = tokio::spawn(async move { gone.create_snapshot(snapshot("gone", &source)).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    gone.abort();
    assert!(waiting.iter().all(|one| !one.is_finished()));
    assert_eq!(node.driver.running(), 1, "only the stage has a thread");
    host.open();
    staged.await.unwrap().unwrap();
    for one in waiting {
        match one.await.unwrap() {
            Ok(()) => {}
            // The other call was first, and has locked the volume.
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status:?}"),
        }
    }
    idle(&node).await;
    let listed = controller
        .list_snapshots(ListSnapshotsRequest::default())
        .await;
    let listed = listed.unwrap().into_inner().entries;
    assert!(!listed.is_empty() && listed.len() <= 2, "{listed:?}");
    node.stop().await;
}

#[tokio::test]
async fn leftovers_on_one_pool_are_cleaned_up_while_the_disk_of_another_hangs() {
    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let two = |settings: &mut Settings| settings.pools = vec![pool("default"), pool("other")];
    let gated = Arc::new(host.clone());
    let node = Node::on(machine.clone(), gated, Alpha::default(), two).await;
    let mut controller = node.controller.clone();
    for (name, wipe) in [("default", "discard"), ("other", "none")] {
        let mut volume = create(name);
        let parameters = [("pool", name), ("wipe", wipe)];
        volume.parameters = parameters.map(|(k, v)| (k.into(), v.into())).into();
        // The effect that fails may be one of the periodic work. Then the deletion succeeds, and the volume
        // is created again.
        let mut refused = None;
        for _ in 0..20 {
            let created = controller.create_volume(volume.clone()).await.unwrap();
            let volume_id = created.into_inner().volume.unwrap().volume_id;
            // The volume is in the trash then, and its blocks still exist.
            machine.fail_effect(2, FaultMode::Before(Errno::EIO));
            refused = controller.delete_volume(delete(&volume_id)).await.err();
            if refused.is_some() {
                break;
            }
        }
        let status = refused.expect("the planned failure is one of the deletion");
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
    }
    host.close("discard");
    let left = |name: &str| {
        let trash = Path::new("/memory").join(name).join("trash");
        machine.files_below(&trash).len()
    };
    assert!(left("default") > 0 && left("other") > 0);
    host.reached(1).await;
    until(async || left("other") == 0).await;
    assert!(left("default") > 0, "its disk hangs");
    host.open();
    until(async || left("default") == 0).await;
    node.stop().await;
}

/// Images in the trash of the pool.
fn in_trash(machine: &MemoryHost) -> usize {
    let files = machine.files_below(Path::new("/memory/default/trash"));
    files
        .iter()
        .filter(|file| file.ends_with("data.img"))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_wipe_delays_neither_a_start_nor_other_cleanup() {
    // Some of them come after the one that is being wiped, in whatever order they are found.
    const QUICK: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let machine = MemoryHost::new();
    let node = Node::on(
        machine.clone(),
        Arc::new(machine.clone()),
        Alpha::default(),
        |_| {},
    )
    .await;
    let mut controller = node.controller.clone();
    let mut ids = Vec::new();
    let how = |name: &str| if name == "wiped" { "zero" } else { "none" };
    for name in ["wiped"].into_iter().chain(QUICK) {
        let mut volume = create(name);
        volume.parameters = map([("wipe", how(name))]);
        let created = controller.create_volume(volume).await.unwrap();
        ids.push(created.into_inner().volume.unwrap().volume_id);
    }
    node.stop().await;
    // The state that a delete leaves if a crash cuts it off after the rename.
    let created = Path::new("/memory/default/volumes");
    for id in &ids {
        let (_, uuid) = id.split_once('.').unwrap();
        let trash = format!("/memory/default/trash/{uuid}.0badcafe");
        let rename = Effect::Rename {
            from: &created.join(uuid),
            to: Path::new(&trash),
        };
        machine.perform(&rename).unwrap();
    }
    assert_eq!(in_trash(&machine), ids.len());

    let host = GatedHost::new(machine.clone());
    host.close("zero");
    let _opened = Opens(host.clone());
    let (wrapped, of) = (Arc::new(host.clone()), machine.clone());
    let starting =
        tokio::spawn(async move { Node::on(of, wrapped, Alpha::default(), |_| {}).await });
    until(async || starting.is_finished() || host.waiting() > 0).await;
    let mut starting = starting;
    let started = tokio::time::timeout(WAIT_TIMEOUT, &mut starting).await;
    let node = started.expect("the start waits for a wipe").unwrap();
    host.reached(1).await;
    until(async || in_trash(&machine) == 1).await;
    assert_eq!(host.waiting(), 1, "it is still being wiped");
    // What is left during the wipe is cleaned up as well.
    let later = Path::new("/memory/default/trash/00000000-0000-0000-0000-000000000009.0badcafe");
    machine.perform(&Effect::MakeDir { path: later }).unwrap();
    machine.put_file(&later.join("data.img"), b"").unwrap();
    until(async || in_trash(&machine) == 1).await;
    host.open();
    until(async || in_trash(&machine) == 0).await;
    node.stop().await;
}

#[tokio::test]
async fn a_record_whose_disk_hangs_delays_only_calls_that_need_it() {
    let machine = MemoryHost::new();
    let node = Node::on(
        machine.clone(),
        Arc::new(machine.clone()),
        Alpha::default(),
        |_| {},
    )
    .await;
    let volume_id = node.create("v").await.volume_id;
    node.stop().await;
    let host = GatedHost::new(machine.clone());
    let wrapped = Arc::new(host.clone());
    let node = Node::on(machine, wrapped, Alpha::default(), |_| {}).await;
    let _opened = Opens(host.clone());
    host.close("sync_dir");
    host.close("sync_file");
    // The first request after a start makes sure that the record is durable.
    let (mut controller, asked) = (node.controller.clone(), volume_id.clone());
    let expand = ControllerExpandVolumeRequest {
        volume_id: asked,
        capacity_range: at_least(GIB),
        ..Default::default()
    };
    let waits = tokio::spawn(async move { controller.controller_expand_volume(expand).await });
    host.reached(1).await;
    let mut controller = node.controller.clone();
    let list = controller.list_volumes(ListVolumesRequest::default());
    let listed = tokio::time::timeout(WAIT_TIMEOUT, list).await;
    let listed = listed.expect("a list waits for the disk").unwrap();
    assert_eq!(listed.into_inner().entries.len(), 1);
    let driver = node.driver.clone();
    let look = tokio::task::spawn_blocking(move || driver.probe_pool("default"));
    let looked = tokio::time::timeout(WAIT_TIMEOUT, look).await;
    looked
        .expect("the refresh does not wait for the disk")
        .unwrap();
    let refusal = node.driver.pool_status().remove(0).refusal;
    assert!(refusal.is_some_and(|why| why.contains("its disk hangs")));
    host.open();
    // It may be refused because its pool is no longer served.
    let _ = waits.await.unwrap();
    until(async || {
        let driver = node.driver.clone();
        let look = move || {
            driver.probe_pool("default");
            driver.pool_status().remove(0).refusal.is_none()
        };
        tokio::task::spawn_blocking(look).await.unwrap()
    })
    .await;
    node.stop().await;
}
