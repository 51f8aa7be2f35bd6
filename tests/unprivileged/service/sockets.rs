//! The socket's file, and who may connect to it.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use slackwater::csi::ProbeRequest;
use slackwater::csi::identity_client::IdentityClient;
use slackwater::server::{BindError, Socket};

use crate::service::harness::*;

#[tokio::test]
async fn the_socket_is_for_root_only_and_leaves_no_other_file() {
    let node = Node::start().await;
    node.create("v").await;
    let metadata = std::fs::symlink_metadata(&node.path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let beside: Vec<_> = std::fs::read_dir(node.folder.path()).unwrap().collect();
    assert_eq!(beside.len(), 1, "{beside:?}");
    node.stop().await;
}

#[tokio::test]
async fn the_socket_of_a_dead_process_is_replaced() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
    let path = folder.path().join("csi.sock");
    // Dropping a listener leaves its file.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let socket = Socket::bind(&path).unwrap();
    drop(socket);
    assert!(!path.exists(), "our socket is removed");
}

#[tokio::test]
async fn the_socket_of_a_running_process_is_left_alone() {
    let node = Node::start().await;
    let error = Socket::bind(&node.path).unwrap_err();
    assert!(matches!(error, BindError::Taken(_)), "{error}");
    assert!(error.to_string().ends_with("is served by another process"));
    node.identity.clone().probe(ProbeRequest {}).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn what_is_not_a_socket_is_not_removed() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
    let path = folder.path().join("csi.sock");
    std::fs::create_dir(&path).unwrap();
    let error = Socket::bind(&path).unwrap_err();
    assert!(matches!(error, BindError::NotASocket(_)), "{error}");
    assert!(path.is_dir());

    let link = folder.path().join("link.sock");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let error = Socket::bind(&link).unwrap_err();
    assert!(matches!(error, BindError::NotASocket(_)), "{error}");
}

#[tokio::test]
async fn a_missing_folder_is_named() {
    let error = Socket::bind(std::path::Path::new("/nonexistent/csi.sock")).unwrap_err();
    insta::assert_snapshot!(slackwater::error::chain(&error), @"bind /nonexistent/csi.sock: No such file or directory (os error 2)");
}

#[tokio::test]
async fn a_socket_that_another_process_created_at_the_same_path_stays() {
    let node = Node::start().await;
    std::fs::remove_file(&node.path).unwrap();
    let other = UnixListener::bind(&node.path).unwrap();
    let path = node.path.clone();
    let stopping = node.begin_stop();
    stopping.served.await.unwrap().unwrap();
    assert!(path.exists());
    drop(other);
}

#[tokio::test]
async fn any_authority_in_a_request_is_accepted() {
    let node = Node::start().await;
    for authority in [
        "localhost",
        "csi.sock",
        "node-1:443",
        "[::1]",
        "127.0.0.1",
        "a_b",
    ] {
        let channel = channel_with_authority(node.path.clone(), authority);
        let probe = IdentityClient::new(channel).probe(ProbeRequest {}).await;
        assert!(probe.is_ok(), "{authority}: {probe:?}");
    }
    node.stop().await;
}

#[tokio::test]
async fn many_callers_are_served_at_once() {
    let node = Node::start().await;
    let calls: Vec<_> = (0..50)
        .map(|i| {
            let mut client = slackwater::csi::controller_client::ControllerClient::new(channel(
                node.path.clone(),
            ));
            tokio::spawn(async move { client.create_volume(create(&format!("v{i}"))).await })
        })
        .collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    node.stop().await;
}
