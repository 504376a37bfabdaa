//! The program in front of the archive of a Windows file (onefile.py): it unpacks the archive once and starts hotset.
//!
//! The archive's only folder is named by a hash of its contents. It is unpacked in %LOCALAPPDATA% under another name,
//! and renamed when it is complete.

const std = @import("std");

const Handler = *const fn (u32) callconv(.winapi) c_int;
extern "kernel32" fn SetConsoleCtrlHandler(Handler, c_int) callconv(.winapi) c_int;
/// Zig's own rename and delete call functions that Wine 8 lacks.
extern "kernel32" fn MoveFileExW([*:0]const u16, [*:0]const u16, u32) callconv(.winapi) c_int;

/// The console sends Ctrl-C to both programs: only hotset responds to it.
fn keepWaiting(_: u32) callconv(.winapi) c_int {
    return 1;
}

pub fn main(init: std.process.Init) !void {
    const io = init.io;
    const memory = init.arena.allocator();
    const place = init.environ_map.get("LOCALAPPDATA") orelse std.process.fatal("LOCALAPPDATA is not set", .{});
    const home = unpacked(memory, io, place) catch |fault|
        std.process.fatal("hotset cannot be unpacked into {s}: {t}", .{ place, fault });
    var words: std.ArrayList([]const u8) = .empty;
    try words.append(memory, try std.fs.path.join(memory, &.{ home, "python.exe" }));
    try words.appendSlice(memory, &.{ "-I", "-m", "hotset.cli.main" });
    for ((try init.minimal.args.toSlice(memory))[1..]) |word| try words.append(memory, word);
    _ = SetConsoleCtrlHandler(keepWaiting, 1);
    var child = try std.process.spawn(io, .{ .argv = words.items });
    switch (try child.wait(io)) {
        .exited => |status| std.process.exit(status),
        else => std.process.exit(1),
    }
}

/// Return the folder with Python and hotset.
fn unpacked(memory: std.mem.Allocator, io: std.Io, place: []const u8) ![]const u8 {
    const itself = try std.process.openExecutable(io, .{});
    defer itself.close(io);
    var buffer: [1 << 16]u8 = undefined;
    var archive = itself.reader(io, &buffer);
    var entries = try std.zip.Iterator.init(&archive);
    const first = try entries.next() orelse return error.NothingPacked;
    var path: [std.fs.max_path_bytes]u8 = undefined;
    const name = std.mem.sliceTo(try first.getFilename(&archive, &path, .{}), '/');
    const home = try std.fs.path.join(memory, &.{ place, name });
    const here = std.Io.Dir.cwd();
    if (here.access(io, home, .{})) return home else |_| {}

    std.debug.print("Unpacking hotset into {s}, once.\n", .{home});
    const part = try std.fmt.allocPrint(memory, "{s}.{d}", .{ home, std.os.windows.GetCurrentProcessId() });
    here.deleteTree(io, part) catch {}; // left by a killed process with the same number
    defer here.deleteTree(io, part) catch {};
    {
        const folder = try here.createDirPathOpen(io, part, .{});
        defer folder.close(io);
        try std.zip.extract(folder, &archive, .{});
    }
    const inner = try std.fs.path.join(memory, &.{ part, name });
    const wide = std.unicode.wtf8ToWtf16LeAllocZ;
    if (MoveFileExW(try wide(memory, inner), try wide(memory, home), 0) == 0)
        try here.access(io, home, .{}); // another process was first
    return home;
}
