# For a tap: @...@ are filled in by packaging/manifests.py. Packages of Python come from PyPI while it is installed, which a tap
# may do and homebrew-core does not allow. Never run: there was no Homebrew where it was written.
class Hotset < Formula
  desc "@DESCRIPTION@"
  homepage "@HOMEPAGE@"
  url "@SDIST_URL@"
  sha256 "@SDIST_SHA256@"
  license "MIT"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "python@3.13"

  on_linux do
    depends_on "gcc" # C++20
  end

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--no-cache-dir", "#{buildpath}[serve]"
    bin.install_symlink libexec/"bin/hotset"
    man1.install Dir["docs/man/*.1"]
    generate_completions_from_executable(bin/"hotset", shell_parameter_format: :typer)
  end

  service do
    run [opt_bin/"hotset", "serve"]
    keep_alive true
    environment_variables HOTSET_HOME: var/"hotset"
    log_path var/"log/hotset.log"
    error_log_path var/"log/hotset.log"
  end

  test do
    ENV["HOTSET_HOME"] = testpath
    assert_match version.to_s, shell_output("#{bin}/hotset --version")
    assert_match "kernels", shell_output("#{bin}/hotset doctor --json")
    assert_equal "[]", shell_output("#{bin}/hotset list --json").strip
  end
end
