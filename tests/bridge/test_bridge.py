"""hc.bridge: its names, the cost of importing it, and its error without torch."""


def test_torch_is_imported_by_its_first_bridge(run_python):
    run_python("""
        import sys
        import hostcall as hc
        assert "hostcall.bridge" not in sys.modules
        assert "bridge" in dir(hc) and "torch" in dir(hc.bridge)
        assert callable(hc.bridge.torch)
        assert "torch" not in sys.modules
        try:
            hc.bridge.nothing
        except AttributeError as error:
            assert "hostcall.bridge" in str(error)
        else:
            raise SystemExit("no error")
    """)


def test_without_torch(run_python):
    run_python("""
        import sys
        import hostcall as hc
        sys.modules["torch"] = None
        try:
            hc.bridge.torch(lambda x: x)
        except ModuleNotFoundError as error:
            assert 'pip install torch; in a checkout of hostcall: pip install ".[torch]"' in str(error)
        else:
            raise SystemExit("no error")
    """)
