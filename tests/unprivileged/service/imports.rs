//! ImportFile of the Admin service: volumes that share the blocks of a file of others.

use std::path::Path;
use std::sync::Arc;

use slackwater::agent::admin_client::AdminClient;
use slackwater::agent::import_request::Options;
use slackwater::agent::{ImportFileRequest, ImportFileResponse};
use slackwater::host::Host;
use slackwater::host::memory::MemoryHost;
use slackwater::model::Alpha;
use slackwater::operation::content_identity;
use tonic::{Code, Status};

use crate::service::gate::{GatedHost, Opens};
use crate::service::harness::{Node, channel};

const TOP: &str = "/memory/rawfile";
const IMAGE: &str = "/memory/rawfile/pvc-1/disk.img";
const BYTES: u64 = 64 << 20;

fn write(machine: &MemoryHost, token: u64) {
    machine
        .write_foreign_image(Path::new(IMAGE), BYTES, token)
        .unwrap();
}

async fn start(import_path: &str) -> (GatedHost, Node) {
    let machine = MemoryHost::new();
    write(&machine, 7);
    let host = GatedHost::new(machine.clone());
    let paths = vec![import_path.into()];
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |it| {
        it.import_paths = paths;
    });
    (host, node.await)
}

fn request(node: &Node) -> ImportFileRequest {
    let below = Path::new("pvc-1/disk.img");
    let opened = node.host.open_foreign(Path::new(TOP), below).unwrap();
    ImportFileRequest {
        options: Some(Options {
            name: "data".into(),
            pool: "default".into(),
            ..Options::default()
        }),
        path: IMAGE.into(),
        identity: content_identity(&opened.state()),
        dry_run: false,
    }
}

async fn import(node: &Node, request: ImportFileRequest) -> Result<ImportFileResponse, Status> {
    let mut client = AdminClient::new(channel(node.path.clone()));
    Ok(client.import_file(request).await?.into_inner())
}

#[tokio::test]
async fn the_answer_is_a_volume_or_an_obstacle_or_what_a_dry_run_found() {
    let (_, node) = start(TOP).await;
    let dry_run = ImportFileRequest {
        dry_run: true,
        ..request(&node)
    };
    let found = import(&node, dry_run).await.unwrap();
    assert_eq!(found, ImportFileResponse::default());
    let made = import(&node, request(&node)).await.unwrap();
    let volume = made.volume.unwrap();
    assert_eq!((volume.size_bytes, volume.is_complete), (BYTES, true));
    assert_eq!(made.obstacle, "");
    let elsewhere = ImportFileRequest {
        path: "/etc/passwd".into(),
        ..request(&node)
    };
    let refused = import(&node, elsewhere).await.unwrap();
    assert!(refused.volume.is_none());
    assert!(refused.obstacle.contains("--import-path"), "{refused:?}");
    let relative = ImportFileRequest {
        path: "disk.img".into(),
        ..request(&node)
    };
    let refused = import(&node, relative).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    let without = ImportFileRequest {
        options: None,
        ..request(&node)
    };
    let refused = import(&node, without).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    node.delete(&volume.volume_id).await;
    node.stop().await;
}

#[tokio::test]
async fn a_file_that_changes_during_the_clone_becomes_no_volume() {
    let (host, node) = start(TOP).await;
    let _opens = Opens(host.clone());
    let files = || node.host.files_below(Path::new("/memory/default"));
    let (asked, before) = (request(&node), files());
    host.close("clone_whole");
    let mut client = AdminClient::new(channel(node.path.clone()));
    let call = tokio::spawn(async move { client.import_file(asked).await });
    host.reached(1).await;
    write(&node.host, 8);
    host.open();
    let refused = call.await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(refused.message().contains("changed"), "{refused:?}");
    assert_eq!(files(), before);
    // What it is now can be imported.
    let made = import(&node, request(&node)).await.unwrap();
    let uuid = made.volume.unwrap().volume_id;
    let uuid = uuid.split_once('.').unwrap().1;
    let image = format!("/memory/default/volumes/{uuid}/data.img");
    let tokens = node.host.image_tokens(Path::new(&image)).unwrap();
    assert_eq!(tokens, [7, 8]);
    node.stop().await;
}

#[tokio::test]
async fn a_file_that_is_in_use_is_refused() {
    let (_, node) = start(TOP).await;
    let asked = request(&node);
    node.host.foreign_loop(Path::new(IMAGE)).unwrap();
    let refused = import(&node, asked).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert!(
        refused.message().contains("open for writing"),
        "{refused:?}"
    );
    node.stop().await;
}
